"""`lockstep runs`: lists the runs of a folder, compares some of them, removes checkpoints that none needs."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from lockstep.cli.flag import add_json, add_runs_dir
from lockstep.cli.listing.run_table import tell_comparison, tell_runs
from lockstep.errors import BadInput, LockstepError, SpecError

if TYPE_CHECKING:
    from lockstep.runs.listing.listed_run import ListedRun

    Verbs = argparse._SubParsersAction[argparse.ArgumentParser]


def add_parser(verbs: Verbs) -> None:
    """Add the verb, its actions and their flags."""
    parser = verbs.add_parser("runs", help="list the runs of a folder, compare them, remove old checkpoints")
    actions = parser.add_subparsers(dest="action", metavar="list|compare|prune", required=True)
    text = "all runs of a folder: state, epochs, accuracy, time, size"
    action = actions.add_parser("list", help=text, description=f"List {text}. Writes nothing.")
    add_runs_dir(action)
    add_json(action)
    action.set_defaults(handler=list_runs)
    text = "the settings that differ between runs, and what each of them reached"
    action = actions.add_parser("compare", help=text, description=f"Show {text}. Writes nothing.")
    action.add_argument("runs", nargs="+", metavar="RUN", help="two or more, by name or directory")
    add_runs_dir(action)
    add_json(action)
    action.set_defaults(handler=compare_runs)
    text = "remove old checkpoints, never the newest or the best of a run"
    action = actions.add_parser(
        "prune",
        help=text,
        description=f"{text.capitalize()}. Without --yes it only says what it would remove. A run that is "
        "being trained is left alone, and so is one whose newest checkpoint is damaged.",
    )
    action.add_argument("runs", nargs="*", metavar="RUN", help="by name or directory; default: all runs")
    action.add_argument(
        "--keep", type=int, default=1, metavar="N", help="how many of the newest stay; default: 1"
    )
    action.add_argument("--yes", action="store_true", help="remove them")
    add_runs_dir(action)
    action.set_defaults(handler=prune_runs)


def list_runs(options: argparse.Namespace) -> int:
    """Print a line for each run; what cannot be read is named after them."""
    from lockstep.runs.listing.listed_run import find_runs, read_listed

    found: list[ListedRun] = []
    unreadable: list[str] = []
    for path in find_runs(options.runs_dir):
        try:
            found.append(read_listed(path, options.runs_dir))
        except LockstepError as error:
            unreadable.append(str(error))
    if options.json:
        print(json.dumps([_as_row(each) for each in found]))
        print("".join(f"{line}\n" for line in unreadable), end="", file=sys.stderr)
        return 0
    lines = tell_runs(found) if found else [f"no run in {options.runs_dir}"]
    print("\n".join([*lines, *unreadable]))
    return 0


def compare_runs(options: argparse.Namespace) -> int:
    """Print what differs."""
    from lockstep.runs.listing.listed_run import read_listed
    from lockstep.runs.resume import find_directory

    if len(options.runs) < 2:
        raise SpecError(f"runs compare {options.runs[0]}: name two runs or more")
    paths = [find_directory(options.runs_dir, run).path for run in options.runs]
    found = [read_listed(path, options.runs_dir) for path in paths]
    print(
        json.dumps([_as_row(each) for each in found]) if options.json else "\n".join(tell_comparison(found))
    )
    return 0


def prune_runs(options: argparse.Namespace) -> int:
    """Say what is removed, or would be; with --yes remove it."""
    from lockstep.runs.listing.listed_run import find_runs
    from lockstep.runs.listing.surplus import find_surplus
    from lockstep.runs.resume import find_directory

    if options.keep < 1:
        raise BadInput(f"--keep {options.keep} must be at least 1: the newest checkpoint is never removed")
    named = [find_directory(options.runs_dir, run).path for run in options.runs]
    size = count = 0
    for path in named or find_runs(options.runs_dir):
        found = find_surplus(path, options.keep, removes=options.yes)
        if found.reason:
            print(f"left alone: {found.reason}")
        elif found.files:
            kept = ", ".join(map(str, found.kept))
            print(f"{path}: {len(found.files)} files, {found.num_bytes / 1e6:,.1f} MB; stays: steps {kept}")
        size, count = size + found.num_bytes, count + len(found.files)
    done = "removed" if options.yes else "would be removed; --yes removes them" if count else "to be removed"
    print(f"{count} files, {size / 1e6:,.1f} MB {done}")
    return 0


def _as_row(run: ListedRun) -> dict[str, object]:
    return {**asdict(run), "path": str(run.path)}
