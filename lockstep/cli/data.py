"""`lockstep data`: fetch a published data set, or say what lies in a folder."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.cli.flag import add_json
from lockstep.errors import SpecError
from lockstep.spec import Run
from lockstep.spec.run_file import from_table, parse_overrides

if TYPE_CHECKING:
    Verbs = argparse._SubParsersAction[argparse.ArgumentParser]


def add_parser(verbs: Verbs) -> None:
    """Add the verb, its two actions and their flags."""
    parser = verbs.add_parser("data", help="fetch data sets, or say what is there")
    actions = parser.add_subparsers(dest="action", metavar="get|info", required=True)
    get = actions.add_parser("get", help="fetch a published data set, with checksum and resume")
    get.add_argument("name", metavar="NAME", help="mnist, fashion or cifar10")
    get.add_argument("--dir", type=Path, metavar="DIR", help="default: data/NAME")
    get.add_argument(
        "--mirror", metavar="URL", help="a folder that holds the same files: http, https or file"
    )
    get.set_defaults(handler=get_data)
    info = actions.add_parser("info", help="what a data set holds")
    info.add_argument("name", metavar="NAME", help="shapes, mnist, fashion, cifar10 or folder")
    info.add_argument("--dir", type=Path, metavar="DIR", help="default: data/NAME")
    info.add_argument(
        "-o",
        "--override",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="keys of data as in `lockstep train`, like data.size=64",
    )
    add_json(info)
    info.set_defaults(handler=show_info)


def get_data(options: argparse.Namespace) -> int:
    """Fetch with a progress bar a file."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from lockstep.data.fetch import fetch

    directory = options.dir or Path("data") / options.name
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns) as bar:
        tasks: dict[str, int] = {}

        def show(file: str, done: int, total: int) -> None:
            if file not in tasks:
                tasks[file] = bar.add_task(file)
            bar.update(tasks[file], completed=done, total=total or None)  # type: ignore[arg-type]

        fetch(options.name, directory, options.mirror, show)
    print(f"{options.name} is in {directory}: lockstep train {options.name} -o data.dir={directory}")
    return 0


def _find_run(options: argparse.Namespace) -> Run:
    """A Run of this data set, so that its keys are checked as those of a training."""
    table = parse_overrides(options.override)
    if others := sorted(table.keys() - {"data"}):
        raise SpecError(f"-o {others[0]}: data info takes keys of data only, like -o data.size=64")
    given = {"name": options.name, **({"dir": str(options.dir)} if options.dir else {})}
    row = table.get("data", {})
    if isinstance(row, dict):
        if twice := sorted(row.keys() & given.keys()):
            key = twice[0]
            raise SpecError(f"-o data.{key}: {given[key]} is given as {'NAME' if key == 'name' else '--dir'}")
        row |= given
    return from_table({"data": row})


def show_info(options: argparse.Namespace) -> int:
    """Open the data set and print what it is."""
    import torch

    from lockstep.data import open_data

    torch.set_num_threads(1)  # as in training: more of them only wait for each other
    store = open_data(_find_run(options))
    facts = {
        "name": store.name,
        "train": len(store.train),
        "test": len(store.test),
        "shape": list(store.shape),
        "classes": list(store.classes),
        "manifest": dict(store.manifest),
    }
    if options.json:
        print(json.dumps(facts))
        return 0
    channels, height, width = store.shape
    print(f"{store.name}: {len(store.train):,} training and {len(store.test):,} test images")
    print(f"  {channels} × {height} × {width} (channels, height, width), {len(store.classes)} classes")
    print(f"  {', '.join(store.classes)}")
    for key, value in store.manifest.items():
        print(f"  {key}: {value}")
    return 0
