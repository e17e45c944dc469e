"""What the files of a run say of it: how far it is, what it reached, its time, what it takes on disk."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.errors import BadInput, LockstepError
from lockstep.runs.checkpoint import checkpoint_steps
from lockstep.runs.directory import RunDirectory
from lockstep.spec.identity import Identity, flatten
from lockstep.spec.run_file import to_table


@dataclass(frozen=True)
class ListedRun:
    """A run as it lies on disk; what it has not reached yet is None."""

    path: Path
    name: str  # its path below the folder of runs
    state: str  # finished, training, stopped
    epochs: int
    of_epochs: int
    split: str  # that the accuracy is of
    accuracy: float | None
    best_accuracy: float | None
    loss: float | None
    seconds: float  # of its steps
    img_s: float | None
    workers: int | None  # at its end
    checkpoints: tuple[int, ...]  # their steps
    num_bytes: int  # of all its files
    weights_sha256: str | None  # of a finished run
    settings: Identity  # by key: all that may change a bit, and the other keys of the Run


def find_runs(runs_dir: Path) -> Iterator[Path]:
    """The directories of all runs below a folder, in order of their names; those of sweeps are deeper."""
    try:
        folders = sorted(path for path in runs_dir.iterdir() if path.is_dir())
    except OSError as error:
        raise BadInput(f"--runs-dir {runs_dir}: cannot be read: {error.strerror}") from None
    for folder in folders:
        if folder.is_symlink() and folder.resolve().parent == runs_dir.resolve():
            continue  # another name of a run that is listed
        with suppress(PermissionError):  # of another user, such as lost+found
            if (folder / "identity.json").is_file():
                yield folder
            elif os.access(folder, os.R_OK | os.X_OK) and not folder.is_symlink():
                yield from find_runs(folder)


def read_listed(path: Path, runs_dir: Path) -> ListedRun:
    """Read a run, which may be training; an error if its files are no run's."""
    try:
        return _read(path, runs_dir)
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise LockstepError(
            f"{path}: metrics.jsonl or summary.json is not as lockstep writes it: {error!r}"
        ) from None


def _read(path: Path, runs_dir: Path) -> ListedRun:
    directory = RunDirectory(path)
    try:
        run, identity, summary = directory.run(), directory.identity(), directory.summary() or {}
    except OSError as error:
        raise LockstepError(f"{path}: cannot be read: {error.strerror}") from None
    rows = directory.read_rows("metrics.jsonl")
    last: dict[str, Any] = next((row for row in reversed(rows) if row["kind"] == "epoch"), {})
    split = summary.get("split") or last.get("split") or "test"
    steps = [row for row in rows if row["kind"] == "step"]
    best = [row[f"{split}_accuracy"] for row in rows if row.get(f"{split}_accuracy") is not None]
    return ListedRun(
        path=path,
        name=str(path.relative_to(runs_dir)) if path.is_relative_to(runs_dir) else str(path),
        state="training" if is_held(path) else "finished" if summary else "stopped",
        epochs=summary.get("epochs", last["epoch"] + 1 if last else 0),
        of_epochs=run.train.epochs,
        split=split,
        accuracy=summary.get("accuracy", last.get(f"{split}_accuracy")),
        best_accuracy=summary.get("best_accuracy", max(best, default=None)),
        loss=summary.get("loss", last.get(f"{split}_loss")),
        seconds=sum((row["positions"][1] - row["positions"][0]) / row["img_s"] for row in steps),
        img_s=summary.get("img_s", last.get("img_s")),
        workers=summary.get("workers"),
        checkpoints=tuple(sorted(checkpoint_steps(directory.checkpoints))),
        num_bytes=_size_of(path),
        weights_sha256=summary.get("weights_sha256"),
        settings={**flatten("", to_table(run)), **identity},
    )


def _size_of(path: Path) -> int:
    """The bytes of all files below a folder; a run that trains may remove one meanwhile."""
    size = 0
    for file in path.rglob("*"):
        with suppress(FileNotFoundError):
            size += 0 if file.is_dir() else file.lstat().st_size
    return size


def is_held(path: Path) -> bool:
    """Whether a process trains this run, and holds its lock."""
    try:
        with (path / ".lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False
