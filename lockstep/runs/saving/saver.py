"""Saves a run's checkpoints beside training: where, of which step, and what is told of it."""

from __future__ import annotations

from contextlib import suppress
from copy import deepcopy
from pathlib import Path

from lockstep.runs.checkpoint import NewCheckpoint, checkpoint_steps, prune
from lockstep.runs.event import CheckpointSaved, Listener, Notice
from lockstep.runs.saving.checkpoint_writer import CheckpointWriter
from lockstep.runs.train_state import TrainState
from lockstep.spec import Run


class Saver:
    """Worker 0 saves to a folder and tells of it; the others write their parts, if the state is in parts."""

    def __init__(self, emit: Listener, run: Run) -> None:
        self._emit, self._run = emit, run
        self._folder: Path | None = None
        self._identity, self._has_failed = "", False
        self._writer = CheckpointWriter(self._tell)

    def open(self, folder: Path, identity: str) -> None:
        """Save to this folder from now on."""
        self._folder, self._identity = folder, identity

    def close(self, wait: bool = True) -> None:
        """End, once the checkpoint that is being written is whole, unless told not to `wait`."""
        self._folder = None
        if wait:
            self._writer.close()

    def save(self, state: TrainState, wait: bool = False) -> bool:
        """Begin to write a checkpoint, all workers if the state is in parts; `wait` until it is whole.

        If it fails, which may show only later, a warning is told; returns whether nothing has failed yet.
        """
        self._writer.settle(wait=True)
        self._has_failed = False
        if self._folder:
            keep = self._run.checkpoint.count(finished=False)
            new = NewCheckpoint(self._folder, deepcopy(state.cursor()), self._identity, keep)
            self._writer.begin(state, new)
        elif state.parts:
            self._writer.begin(state, None)
        self._writer.settle(wait)
        return not self._has_failed

    def settle(self, wait: bool = False) -> None:
        """Tell of the checkpoint that is being written if it is whole or has failed; `wait` until then.

        A collective while several workers write their parts.
        """
        self._writer.settle(wait)

    def is_saved(self, first: int, last: int) -> bool:
        """Whether there is a checkpoint of one of these steps, or one is being written."""
        steps = checkpoint_steps(self._folder) if self._folder else {}
        return any(first <= step <= last for step in (*steps, self._writer.step))

    def keep_last(self, state: TrainState) -> None:
        """Remove what a finished run does not keep."""
        keep = self._run.checkpoint.count(finished=True)
        with suppress(OSError):  # surplus checkpoints do no harm
            if self._folder:
                prune(self._folder, keep, state.step, state.best_step)

    def _tell(self, new: NewCheckpoint, error: OSError | None) -> None:
        self._has_failed = error is not None
        if error is None:
            self._emit(CheckpointSaved(new.path, new.step))
            return
        goes_on = "training goes on and " if new.cursor["epoch"] < self._run.train.epochs else ""
        self._emit(
            Notice(
                f"checkpoint of step {new.step} NOT saved: {error.strerror or error}; {goes_on}"
                f"earlier checkpoints are kept: free space on {new.folder}",
                warning=True,
            )
        )
