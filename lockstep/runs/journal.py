"""Writes what worker 0 records when the loop says so: metrics, trace, summary and events; has its saver.

Every worker keeps its latest rows in memory: a new worker 0 writes those that a killed one did not.
"""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path
from typing import Any

from lockstep.comm.group import Group
from lockstep.models.tensors import tensors_sha256
from lockstep.runs.about import About, Pace, about_row
from lockstep.runs.directory import RunDirectory, is_done
from lockstep.runs.event import (
    EpochDone,
    Finished,
    Listener,
    Notice,
    Regrouped,
    Started,
    StepDone,
)
from lockstep.runs.saving.saver import Saver
from lockstep.runs.train_state import TrainState
from lockstep.spec.generation import Generation
from lockstep.spec.identity import digest

_METRICS, _TRACE = "metrics.jsonl", "trace.jsonl"
_HASH_DIGITS = 16
_NOTED = 64  # rows kept in memory; a killed worker 0 has lost at most those of a step and an epoch's end


class Journal:
    """Worker 0 writes rows to the run's directory and emits events; others only keep rows in memory."""

    def __init__(self, on_event: Listener, about: About, trace: bool) -> None:
        self._directory: RunDirectory | None = None
        self._emit, self._about, self._trace = on_event, about, trace
        self.noted: deque[tuple[str, dict[str, Any]]] = deque(maxlen=_NOTED)
        self.undone = 0  # steps to be done again, since the last row of a generation
        self._started = False
        self._told: set[str] = set()
        self._pace, self.epoch_pace = Pace(), Pace()
        self.saver = Saver(on_event, about.run)
        self.identity = digest(about.identity)
        self.found: dict[str, Any] = {}  # the run's path and summary, the same on every worker

    def open(self, directory: RunDirectory) -> None:
        """Write to the run's directory from now on, under the identity that the run began with."""
        self._directory, self._started = directory, False
        self.identity = digest(directory.identity())
        self.saver.open(directory.checkpoints, self.identity)
        self.found = {"path": str(directory.path.resolve()), "summary": directory.summary()}

    def close(self, wait: bool = True) -> None:
        """Close the files, once a checkpoint that is being written is whole, unless told not to `wait`."""
        self.saver.close(wait)
        if self._directory:
            self._directory.close()
        self._directory = None

    @property
    def is_open(self) -> bool:
        return self._directory is not None

    @property
    def path(self) -> Path:
        """The run's directory; on the worker that writes it, as the user gave it."""
        return self._directory.path if self._directory else Path(self.found["path"])

    def start(self, state: TrainState, steps_per_epoch: int, num_workers: int, takes_over: bool) -> None:
        """Open the files and announce the run, if this worker has just become the one that writes them."""
        self._go_back(state)
        if not self._directory or self._started:
            if self._trace and not self.noted:
                self.trace(state)  # in case this worker takes over
            return
        self._started = True
        self._open_logs(state, takes_over)
        about = self._about
        for text in about.notices if not state.step and not takes_over else ():
            self.notice(text)
        for text in about.warnings if not takes_over else ():
            self.warn(text)
        self._emit(
            Started(
                self._directory.path,
                about.run,
                about.model,
                about.data,
                self.identity,
                about.identity["numerics.device"],
                about.num_params,
                about.num_train,
                about.num_test,
                steps_per_epoch,
                state.step,
                num_workers,
                takes_over,
                about.identity["kernels.set"],
                about.num_val,
            )
        )

    def _go_back(self, state: TrainState) -> None:
        """Count the steps that will be done again, and forget their rows."""
        self.undone += max([state.step, *(row["step"] for _, row in self.noted)]) - state.step
        kept = [(name, row) for name, row in self.noted if is_done(row, state.step, state.epoch)]
        self.noted = deque(kept, self.noted.maxlen)

    def _open_logs(self, state: TrainState, takes_over: bool) -> None:
        assert self._directory
        names = [_METRICS, _TRACE] if self._trace else [_METRICS]
        rows = [(n, row) for n in names for row in self._directory.start_log(n, state.step, state.epoch)]
        there = {(name, *about_row(row)) for name, row in rows}
        self._told |= {text for _, row in rows if takes_over for text in row.get("changes", ())}
        for name, row in self.noted:  # rows that the worker before had no time to write
            if (name, *about_row(row)) not in there and row["step"] <= state.step:
                self._directory.add_row(name, row, self.warn)
        if self._trace and not takes_over:
            self.trace(state)

    def regroup(self, found: Generation | None, first_step: int, num_workers: int) -> None:
        """Record that a new generation of workers has completed a step; also called at a run's first step."""
        now, changes = time.time(), tuple(map(str, found.changes)) if found else ()
        done = Regrouped(
            found.number if found else 1,
            first_step,
            num_workers,
            tuple(text for text in changes if text not in self._told),
            round(found.since if found else now, 3),
            round(now - found.since, 3) if found and changes else 0.0,
            len(found.spares) if found else 0,
            self.undone,
        )
        self.undone = 0
        self._told |= set(changes)  # a generation repeats changes that may not have been reported
        self._add(_METRICS, {"kind": "generation", **vars(done)})
        if self._directory and done.changes:
            self._emit(done)

    def summarize(
        self, state: TrainState, group: Group, hashes: dict[str, str], told: dict[str, Any]
    ) -> dict[str, Any]:
        """The summary of a finished run; `told` is its test on other images, and its plan, if any."""
        return {
            **state.results(self._about.run.evaluate),
            "split": self._about.split,
            **told,
            "epochs": state.epoch,
            "steps": state.step,
            "img_s": self._pace.img_s,
            **self._pace.longest_wait(group),
            "device": self._about.identity["numerics.device"],
            "workers": group.size,
            "backend": group.backend,
            "generations": self._generations(),
            "identity": self.identity,
            **hashes,
        }

    def _generations(self) -> list[dict[str, Any]]:
        """The timeline of lost and joined workers, from the metrics."""
        rows = self._directory.read_rows(_METRICS) if self._directory else []
        return [row for row in rows if row.pop("kind") == "generation"]

    def step(self, done: StepDone, state: TrainState) -> None:
        """Record a committed step."""
        batch, steps = self._about.run.train.batch_of(done.epoch), done.steps
        images, end = batch * steps, batch * done.step_in_epoch
        for pace in (self._pace, self.epoch_pace):
            pace.add(images, images / done.img_s, done.data_wait_s, steps)
        self._add(_METRICS, {"kind": "step", **done.row(), "positions": [end - images, end]})
        self.trace(state)
        if self._directory:
            self._emit(done)

    def epoch(self, done: EpochDone) -> None:
        """Record that an epoch was trained and evaluated."""
        self.epoch_pace = Pace()
        self._add(_METRICS, {"kind": "epoch", **done.row()})
        if self._directory:
            self._emit(done)

    def trace(self, state: TrainState) -> None:
        """Record a hash of every tensor: `lockstep verify` finds the first step that differs between runs."""
        if self._trace:
            named = state.named()
            hashes = {name: tensors_sha256({name: named[name]})[:_HASH_DIGITS] for name in sorted(named)}
            self._add(_TRACE, {"step": state.step, "tensors": hashes})

    def finish(self, summary: dict[str, Any], state: TrainState, write: bool = True) -> str:
        """Write the summary and announce the end; returns which files could not be written."""
        if not self._directory:
            return ""
        is_saved = self.saver.is_saved(state.step, state.step)
        lost = [f"its checkpoint of step {state.step}"] if write and not is_saved else []
        if write:
            try:
                self._directory.write_summary(summary)
            except OSError as error:
                self.warn(f"summary.json NOT written: {error.strerror or error}")
                lost.append("summary.json")
        if write and not lost:
            self.saver.keep_last(state)
        self._emit(Finished(self._directory.path, summary))
        return " and ".join(lost)

    def notice(self, text: str, warning: bool = False) -> None:
        """Emit a message that the user should know."""
        if self._directory:
            self._emit(Notice(text, warning))

    def warn(self, text: str) -> None:
        """Emit a warning."""
        self.notice(text, warning=True)

    def _add(self, name: str, row: dict[str, Any]) -> None:
        self.noted.append((name, row))
        if self._directory:
            self._directory.add_row(name, row, self.warn)
