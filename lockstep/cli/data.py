"""`lockstep data`: downloads a published data set; shows what one holds; checks or packs its files."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.cli.data_action.pack import add_pack
from lockstep.cli.data_action.show import add_show
from lockstep.cli.flag import add_json
from lockstep.data.catalog import data_names
from lockstep.errors import SpecError
from lockstep.spec import Run
from lockstep.spec.run_file import from_table, parse_overrides

if TYPE_CHECKING:
    from lockstep.data import Store

    Verbs = argparse._SubParsersAction[argparse.ArgumentParser]

_WORDS = {"train": "training", "val": "validation", "test": "test"}


def add_parser(verbs: Verbs) -> None:
    """Add the verb, its actions and their flags."""
    parser = verbs.add_parser("data", help="fetch data sets, show what is there, check or pack it")
    actions = parser.add_subparsers(dest="action", metavar="get|show|info|check|pack", required=True)
    get = actions.add_parser("get", help="fetch a published data set, with checksum and resume")
    get.add_argument("name", metavar="NAME", help=_names(fetchable=True))
    get.add_argument("--dir", type=Path, metavar="DIR", help="default: data/NAME")
    get.add_argument(
        "--mirror", metavar="URL", help="a folder that holds the same files: http, https or file"
    )
    get.set_defaults(handler=get_data)
    add_show(actions)
    for name, text, handler in (
        ("info", "what a data set holds", show_info),
        ("check", "read all of a data set; exit code 1 if a file is bad", check_files),
    ):
        action = actions.add_parser(name, help=text, description=text.capitalize() + ".")
        action.add_argument("name", metavar="NAME", help=_names())
        action.add_argument("--dir", type=Path, metavar="DIR", help="default: data/NAME")
        action.add_argument(
            "-o",
            "--override",
            action="append",
            default=[],
            metavar="KEY=VALUE",
            help="keys of data as in `lockstep train`, like data.size=64",
        )
        add_json(action)
        action.set_defaults(handler=handler)
    add_pack(actions)


def _names(fetchable: bool = False) -> str:
    *first, last = data_names(fetchable)
    return f"{', '.join(first)} or {last}"


def get_data(options: argparse.Namespace) -> int:
    """Download a data set, with a progress bar for each file."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from lockstep.data.catalog import published_as
    from lockstep.data.fetch import fetch

    directory, published = options.dir or Path("data") / options.name, published_as(options.name)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns) as bar:
        tasks: dict[str, int] = {}

        def show(file: str, done: int, total: int) -> None:
            if file not in tasks:
                tasks[file] = bar.add_task(file)
            bar.update(tasks[file], completed=done, total=total or None)  # type: ignore[arg-type]

        fetch(published, directory, options.mirror, show)
    print(f"{options.name} is in {directory}: lockstep train {options.name} -o data.dir={directory}")
    return 0


def _find_run(options: argparse.Namespace) -> Run:
    """Make a Run with this data set, so that its keys are checked as in training."""
    table = parse_overrides(options.override)
    if others := sorted(table.keys() - {"data"}):
        raise SpecError(
            f"-o {others[0]}: data {options.action} takes keys of data only, like -o data.size=64"
        )
    given = {"name": options.name, **({"dir": str(options.dir)} if options.dir else {})}
    row = table.get("data", {})
    if isinstance(row, dict):
        if twice := sorted(row.keys() & given.keys()):
            key = twice[0]
            raise SpecError(f"-o data.{key}: {given[key]} is given as {'NAME' if key == 'name' else '--dir'}")
        row |= given
    return from_table({"data": row})


def show_info(options: argparse.Namespace) -> int:
    """Open the data set and print what it holds."""
    import torch

    from lockstep.data import open_data

    torch.set_num_threads(1)  # as in training: more threads only wait for each other
    store = open_data(_find_run(options))
    counts = {"train": len(store.train), **{name: len(split) for name, split in store.eval_splits().items()}}
    if options.json:
        facts = {
            "name": store.name,
            **counts,
            "shape": list(store.shape),
            "classes": list(store.classes),
            "manifest": dict(store.manifest),
            "notices": list(store.notices),
            "warnings": list(store.warnings),
        }
        print(json.dumps(facts))
    else:
        _print_info(store, counts)
    return 0


def _print_info(store: Store, counts: dict[str, int]) -> None:
    *first, last = (f"{count:,} {_WORDS[name]}" for name, count in counts.items())
    print(f"{store.name}: {', '.join(first)} and {last} images")
    channels, height, width = store.shape
    what = "values" if store.has_values else "classes"
    print(f"  {channels} × {height} × {width} (channels, height, width), {len(store.classes)} {what}")
    print(f"  {', '.join(store.classes)}")
    for text in (*store.notices, *(f"warning: {text}" for text in store.warnings)):
        print(f"  {text}")
    for key, value in store.manifest.items():
        if not key.startswith("num_"):  # printed above
            print(f"  {key}: {value}")


def check_files(options: argparse.Namespace) -> int:
    """Read the whole data set with a progress bar, then list the bad files."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from lockstep.data.catalog import check_data

    run = _find_run(options)
    columns = (TextColumn("reading"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as bar:
        task = bar.add_task("", total=None)
        bad = check_data(run, lambda done, total: bar.update(task, completed=done, total=total))
    if options.json:
        print(json.dumps({"name": options.name, "bad": bad}))
    else:
        print("\n".join(bad) if bad else f"{options.name}: all of it can be read")
    return 1 if bad else 0
