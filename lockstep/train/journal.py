"""What is kept and told of a run: its directory's files and the events; worker 0's task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lockstep.spec.identity import digest
from lockstep.train import checkpoint
from lockstep.train.directory import RunDirectory
from lockstep.train.event import CheckpointSaved, EpochDone, Finished, Listener, Notice, Started, StepDone
from lockstep.train.setup import Setup
from lockstep.train.state import TrainState, tensors_sha256

_METRICS, _TRACE = "metrics.jsonl", "trace.jsonl"
_HASH_DIGITS = 16


class Journal:
    """Writes and tells what happens; without a directory, on every other worker, it does nothing."""

    def __init__(self, directory: RunDirectory | None, on_event: Listener, setup: Setup, trace: bool) -> None:
        self._directory, self._emit, self._setup, self._trace = directory, on_event, setup, trace
        self.identity = digest(setup.identity)

    @property
    def path(self) -> Path:
        return self._directory.path if self._directory else Path()

    def summary(self) -> dict[str, Any]:
        """Where the run lies, and what it reported if it is finished already."""
        return {
            "path": str(self.path),
            "summary": self._directory.summary() if self._directory else None,
        }

    def start(self, state: TrainState, steps_per_epoch: int, num_workers: int) -> None:
        """Open the files and announce the run."""
        setup = self._setup
        if not self._directory:
            return
        self._directory.start_log(_METRICS, state.step)
        if self._trace:
            self._directory.start_log(_TRACE, state.step)
            self.trace(state)
        for text in setup.notices if not state.step else ():
            self.notice(text)
        for text in setup.warnings:
            self.warn(text)
        self._emit(
            Started(
                self._directory.path,
                setup.run,
                setup.model_name,
                setup.store.name,
                self.identity,
                setup.identity["numerics.device"],
                sum(p.numel() for p in setup.model.parameters()),
                len(setup.store.train),
                len(setup.store.test),
                steps_per_epoch,
                state.step,
                num_workers,
            )
        )

    def step(self, done: StepDone, state: TrainState) -> None:
        """A step was committed."""
        batch = self._setup.run.train.batch
        first = (done.step_in_epoch - 1) * batch
        self._add({"kind": "step", **vars(done), "positions": [first, first + batch]})
        self.trace(state)
        if self._directory:
            self._emit(done)

    def epoch(self, done: EpochDone) -> None:
        """An epoch was trained and evaluated."""
        self._add({"kind": "epoch", **vars(done)})
        if self._directory:
            self._emit(done)

    def trace(self, state: TrainState) -> None:
        """Keep a hash of every tensor, so that the first step that differs from another run can be found."""
        if self._directory and self._trace:
            named = state.named()
            hashes = {name: tensors_sha256({name: named[name]})[:_HASH_DIGITS] for name in sorted(named)}
            self._directory.add_row(_TRACE, {"step": state.step, "tensors": hashes}, self.warn)

    def save(self, state: TrainState) -> bool:
        """Write a checkpoint; a full disk is a loud warning, and the old checkpoint stays."""
        if not self._directory:
            return True
        folder = self._directory.checkpoints
        try:
            path = checkpoint.save(folder, state, self.identity, self._setup.run.checkpoint.keep)
        except OSError as error:
            self.warn(
                f"checkpoint of step {state.step} NOT saved: {error.strerror or error}; training goes on and "
                f"the checkpoints before it stay: free space on {folder}"
            )
            return False
        self._emit(CheckpointSaved(path, state.step))
        return True

    def finish(self, summary: dict[str, Any], write: bool = True) -> None:
        """The run is done."""
        if not self._directory:
            return
        if write:
            try:
                self._directory.write_summary(summary)
            except OSError as error:
                self.warn(f"summary.json NOT written: {error.strerror}")
        self._emit(Finished(self._directory.path, summary))

    def notice(self, text: str) -> None:
        """Tell something the user should know."""
        if self._directory:
            self._emit(Notice(text))

    def warn(self, text: str) -> None:
        """Tell something that asks for attention."""
        if self._directory:
            self._emit(Notice(text, warning=True))

    def _add(self, row: dict[str, Any]) -> None:
        if self._directory:
            self._directory.add_row(_METRICS, row, self.warn)
