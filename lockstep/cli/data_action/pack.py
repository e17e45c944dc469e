"""`lockstep data pack`: writes a data set as a pack, and goes on with one that was interrupted."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.errors import SpecError
from lockstep.spec.run_file import parse_overrides

if TYPE_CHECKING:
    Actions = argparse._SubParsersAction[argparse.ArgumentParser]


def add_pack(actions: Actions) -> None:
    """Add the action and its flags."""
    text = "write a data set as a few large files, which open at once"
    parser = actions.add_parser("pack", help=text, description=text.capitalize() + ".")
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="a folder of images, tar shards or Parquet files (or a pattern), or a set: mnist, shapes …",
    )
    parser.add_argument("dest", type=Path, metavar="DEST", help="the new folder")
    parser.add_argument(
        "--as",
        dest="form",
        choices=("files", "jpeg", "raw"),
        help="files: kept exactly, the default; jpeg: made smaller, needs --size; raw: pixels",
    )
    parser.add_argument("--raw", dest="form", action="store_const", const="raw", help="as --as raw")
    parser.add_argument(
        "--size", type=int, default=0, metavar="S", help="pixels of the shorter side; with --raw, of both"
    )
    parser.add_argument("--quality", type=int, default=90, metavar="Q", help="of JPEG; default: 90")
    parser.add_argument(
        "--shard-mb", type=float, default=256, metavar="MB", help="size of a shard; default: 256"
    )
    parser.add_argument("--threads", type=int, metavar="N", help="default: one a core, at most 8")
    parser.add_argument(
        "--skip-bad", action="store_true", help="leave out images that cannot be decoded, and list them"
    )
    parser.add_argument("--classes", type=Path, metavar="FILE", help="names for numbered classes, one a line")
    parser.add_argument(
        "-o",
        "--override",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="keys of data as in `lockstep train`, like data.val_fraction=0.2",
    )
    parser.set_defaults(handler=pack)


def pack(options: argparse.Namespace) -> int:
    """Pack with a progress bar, then list bad images."""
    import torch
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from lockstep.data.pack.find_source import bad_images, find_source
    from lockstep.data.pack.image_form import ImageForm
    from lockstep.data.pack.write_pack import THREADS, PackPlan, check_dest, write_pack

    check_dest(options.dest)
    torch.set_num_threads(1)  # threads of our own do the work
    form = ImageForm(options.form or ("jpeg" if options.size else "files"), options.size, options.quality)
    threads = THREADS if options.threads is None else options.threads
    plan = PackPlan(form, options.shard_mb, threads, options.skip_bad)
    columns = (TextColumn("packing"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(file=sys.stderr)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        source = find_source(options.source, _data_keys(options.override), options.classes)
        for text in source.warnings:
            console.print(f"warning: {text}", markup=False, soft_wrap=True)
        try:
            result = write_pack(
                source, options.dest, plan, lambda done, total: bar.update(task, completed=done, total=total)
            )
        except KeyboardInterrupt:
            text = f"{options.dest}.part keeps the shards that are whole: the same command goes on"
            console.print(text, markup=False, soft_wrap=True)
            raise
    if result.bad and not result.is_done:
        print("\n".join(result.bad))
        print(f"lockstep: {bad_images(result, options.dest)}", file=sys.stderr)
        return 1
    counts = ", ".join(f"{count:,} {name}" for name, count in result.counts.items())
    skipped = f", {len(result.bad):,} bad ones left out (skipped.txt)" if result.bad else ""
    print(f"{options.dest}: {counts} images{skipped}")
    print(f"lockstep train folder -o data.name=pack -o data.dir={options.dest}")
    return 0


def _data_keys(overrides: list[str]) -> dict[str, object]:
    table = parse_overrides(overrides)
    if others := sorted(table.keys() - {"data"}):
        raise SpecError(f"-o {others[0]}: data pack takes keys of data only, like -o data.val_fraction=0.2")
    keys = table.get("data", {})
    assert isinstance(keys, dict), "parse_overrides makes tables"
    return keys
