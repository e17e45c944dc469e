"""A run small enough for tests, in this process or as a real one of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from patience import PATIENCE_S

import lockstep
from lockstep.elastic.worker_groups import WorkerGroups
from lockstep.spec.run_file import from_table, merge, parse_overrides, to_table
from lockstep.train.setup import Given
from lockstep.train.worker import fit

OVERRIDES = (
    "data.size=16",
    "data.num_train=330",
    "data.num_test=70",
    "train.batch=32",
    "train.lanes=4",
    "train.epochs=2",
    "checkpoint.every_steps=3",
)


def small_run(*overrides: str) -> lockstep.Run:
    """LeNet-5 on 330 small shapes: 10 steps an epoch, 2 epochs."""
    return from_table(merge(to_table(lockstep.recipe("shapes")), parse_overrides([*OVERRIDES, *overrides])))


def as_worker(run: lockstep.Run, launch: lockstep.Launch, on_event: Any, **arguments: Any) -> Any:
    return fit(run, launch, on_event, WorkerGroups, Given(**arguments))


def train(run: lockstep.Run, runs_dir: Path, by: Any = as_worker, **arguments: Any) -> Any:
    """Train in this process, silently; gives the result and the events.

    As one worker does, without the picture at the end, which takes longer than such a small run; with
    `by=lockstep.train`, as a user does.
    """
    events: list[object] = []
    launch = lockstep.Launch(
        **{"name": "run", "runs_dir": runs_dir, "device": "cpu", **arguments.pop("launch", {})}
    )
    on_event = arguments.pop("on_event", events.append)
    return by(run, launch=launch, on_event=on_event, **arguments), events


def command(*arguments: str) -> list[str]:
    """The command line, as a process of this Python."""
    return [sys.executable, "-W", "error", "-m", "lockstep", *arguments]


def train_command(runs_dir: Path, *arguments: str, overrides: tuple[str, ...] = ()) -> list[str]:
    """`lockstep train` of the small run."""
    keys = [part for item in (*OVERRIDES, *overrides) for part in ("-o", item)]
    return command(
        "train", "--runs-dir", str(runs_dir), "--name", "run", "--device", "cpu", *keys, *arguments
    )


def call(
    arguments: list[str], timeout: float = PATIENCE_S, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end and keep what it printed."""
    return subprocess.run(arguments, check=False, capture_output=True, text=True, timeout=timeout, **options)


def summary(directory: Path) -> dict[str, Any]:
    """What a finished run reported."""
    return dict(json.loads((directory / "summary.json").read_text()))


def rows(directory: Path, kind: str) -> list[dict[str, Any]]:
    """The rows of one kind in metrics.jsonl, without one that is being written."""
    whole, _, _ = (directory / "metrics.jsonl").read_text().rpartition("\n")
    return [row for row in map(json.loads, whole.splitlines()) if row["kind"] == kind]
