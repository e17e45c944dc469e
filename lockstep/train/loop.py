"""The loop: epochs of steps, evaluation, checkpoints, and an orderly end whatever happens.

Wraps the way of a batch (store → order → augment → loader → step) and tells everything as events.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lockstep.data.loader import TrainLoader
from lockstep.errors import Interrupted, NumericsError, OutOfMemory
from lockstep.spec import Launch, Run
from lockstep.spec.identity import digest
from lockstep.train import checkpoint
from lockstep.train.check import is_out_of_memory
from lockstep.train.directory import RunDirectory
from lockstep.train.evaluate import averaged_weights
from lockstep.train.event import CheckpointSaved, EpochDone, Finished, Listener, Notice, Started, StepDone
from lockstep.train.interrupt import Interrupt
from lockstep.train.loss import Loss
from lockstep.train.lower import lower
from lockstep.train.numerics import plain_torch
from lockstep.train.resume import open_directory, recorded_identity
from lockstep.train.setup import Setup, set_up
from lockstep.train.state import Totals, TrainState
from lockstep.train.step import Step


@dataclass(frozen=True)
class Result:
    """A finished run: where it lies, what it reported, and the trained model."""

    directory: Path
    summary: dict[str, Any]
    model: nn.Module


def fit(
    run: Run,
    launch: Launch,
    on_event: Listener,
    *,
    model: nn.Module | None = None,
    data: Any = None,
    loss: Loss | None = None,
) -> Result:
    """Train a Run from its beginning or from where it stopped, to its end."""
    with plain_torch(), torch.random.fork_rng():
        setup = set_up(run, launch.device, model, data, loss, recorded=recorded_identity(launch))
        directory, saved = open_directory(setup, launch, on_event)
        state = TrainState.begin(setup.model, run.optimizer, run.train.ema)
        try:
            if saved:
                saved.restore(state)
            return _Loop(setup, state, directory, on_event).run()
        finally:
            directory.close()


class _Loop:
    def __init__(self, setup: Setup, state: TrainState, directory: RunDirectory, on_event: Listener) -> None:
        self._setup, self._state, self._directory, self._emit = setup, state, directory, on_event
        train = setup.run.train
        self._loader = TrainLoader(
            setup.store.train,
            setup.augment(),
            batch=train.batch,
            lanes=train.lanes,
            device=setup.device,
            memory_format=setup.memory_format,
        )
        self._identity = digest(setup.identity)
        self._first_step, self._busy_s = state.step, 0.0
        self._interrupt = Interrupt()

    def run(self) -> Result:
        """All that is left of the run."""
        finished = self._directory.summary()
        if finished and self._state.step == self._setup.run.train.epochs * len(self._loader):
            self._emit(Notice("the run is finished already; nothing to do"))
            return self._finish(finished)
        self._directory.start_metrics(self._state.step)
        self._announce()
        try:
            with self._lower(), self._interrupt, self._explain_memory():
                if not self._state.step:
                    self._save()  # from here on a run that dies can be resumed
                while self._state.epoch < self._setup.run.train.epochs:
                    self._train_epoch()
                    self._end_epoch()
        except NumericsError:
            self._save()
            raise
        summary = self._summarize()
        try:
            self._directory.write_summary(summary)
        except OSError as error:
            self._warn(f"summary.json NOT written: {error.strerror}")
        return self._finish(summary)

    def _train_epoch(self) -> None:
        state, run = self._state, self._setup.run
        last = time.perf_counter()
        for lanes in self._loader.epoch(state.epoch, state.step_in_epoch):
            result = self._step(lanes)
            state.totals.loss += result.loss
            state.totals.correct += result.correct
            state.totals.samples += run.train.batch
            now = time.perf_counter()
            seconds, last = now - last, now
            self._busy_s += seconds
            done = StepDone(
                state.epoch,
                state.step_in_epoch,
                state.step,
                result.loss,
                result.correct / run.train.batch,
                result.lr,
                run.train.batch / seconds,
            )
            self._report_step(done)
            if self._interrupt.signal:
                self._stop(self._interrupt.signal)
            if state.step % run.checkpoint.every_steps == 0 and state.step_in_epoch < len(self._loader):
                self._save()
                last = time.perf_counter()

    def _end_epoch(self) -> None:
        """Evaluate, move the cursor to the next epoch, report and save."""
        state, totals = self._state, self._state.totals
        with averaged_weights(state.model, state.ema):
            evaluation = self._setup.evaluator()(state.model)
        state.evaluation = evaluation.loss, evaluation.accuracy
        best = evaluation.accuracy > state.best_accuracy
        if best:
            state.best_accuracy, state.best_step = evaluation.accuracy, state.step
        done = EpochDone(
            state.epoch,
            state.step,
            totals.loss / len(self._loader),
            totals.correct / totals.samples,
            evaluation.loss,
            evaluation.accuracy,
            (state.step - self._first_step) * self._setup.run.train.batch / max(self._busy_s, 1e-9),
            best,
        )
        state.epoch, state.step_in_epoch, state.totals = state.epoch + 1, 0, Totals()
        self._directory.add_metrics({"kind": "epoch", **vars(done)}, self._warn)
        self._emit(done)
        self._save()

    def _report_step(self, done: StepDone) -> None:
        batch = self._setup.run.train.batch
        first = (done.step_in_epoch - 1) * batch
        row = {"kind": "step", **vars(done), "positions": [first, first + batch]}
        self._directory.add_metrics(row, self._warn)
        self._emit(done)

    def _save(self) -> bool:
        """Write a checkpoint; a full disk is a loud warning, and the old checkpoint stays."""
        state, run = self._state, self._setup.run
        try:
            path = checkpoint.save(self._directory.checkpoints, state, self._identity, run.checkpoint.keep)
        except OSError as error:
            self._warn(
                f"checkpoint of step {state.step} NOT saved: {error.strerror or error}; training goes on and "
                f"the checkpoints before it stay: free space on {self._directory.checkpoints}"
            )
            return False
        self._emit(CheckpointSaved(path, state.step))
        return True

    def _stop(self, number: signal.Signals) -> None:
        saved = (
            "the state is saved" if self._save() else "its state could NOT be saved, older checkpoints stay"
        )
        raise Interrupted(
            f"stopped by {number.name} after step {self._state.step}; {saved}: "
            f"go on with `lockstep train --resume {self._directory.path}`",
            number,
        )

    def _announce(self) -> None:
        setup = self._setup
        for text in setup.notices if not self._state.step else ():
            self._emit(Notice(text))
        for text in setup.warnings:
            self._warn(text)
        self._emit(
            Started(
                self._directory.path,
                setup.run,
                setup.model_name,
                setup.store.name,
                self._identity,
                setup.identity["numerics.device"],
                sum(p.numel() for p in setup.model.parameters()),
                len(setup.store.train),
                len(setup.store.test),
                len(self._loader),
                self._state.step,
            )
        )

    def _summarize(self) -> dict[str, Any]:
        state = self._state
        images = (state.step - self._first_step) * self._setup.run.train.batch
        assert state.evaluation is not None, "a finished run was evaluated"
        return {
            "accuracy": state.evaluation[1],
            "loss": state.evaluation[0],
            "best_accuracy": state.best_accuracy,
            "best_step": state.best_step,
            "epochs": state.epoch,
            "steps": state.step,
            "img_s": images / max(self._busy_s, 1e-9),
            "device": self._setup.identity["numerics.device"],
            "identity": self._identity,
            **state.hashes(),
        }

    def _finish(self, summary: dict[str, Any]) -> Result:
        self._setup.model.eval()
        self._emit(Finished(self._directory.path, summary))
        return Result(self._directory.path, summary, self._setup.model)

    def _warn(self, text: str) -> None:
        self._emit(Notice(text, warning=True))

    @contextmanager
    def _lower(self) -> Iterator[None]:
        """The model made ready to run lanes, and given back as it was."""
        setup = self._setup
        lowered = lower(
            setup.model,
            setup.loss,
            setup.kernels,
            seed=setup.run.seed,
            bf16=setup.bf16,
            sample=lambda: next(self._loader.epoch(0)),
        )
        self._step = Step(setup.run, self._state, lowered, len(self._loader))
        try:
            yield
        finally:
            lowered.release()

    @contextmanager
    def _explain_memory(self) -> Iterator[None]:
        train = self._setup.run.train
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise OutOfMemory(
                f"out of memory on {self._setup.device} with {train.batch // train.lanes} images a lane: "
                f"raise train.lanes={train.lanes} (smaller lanes), lower train.batch={train.batch} or the "
                "image size, or use precision=bf16"
            ) from None
