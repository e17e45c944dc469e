"""The loop of a run: epochs of steps, evaluation, which steps are checkpointed, an orderly end in any case.

It drives a batch: store → order → augment → loader → step. Worker 0 writes the run's directory, and events.
"""

from __future__ import annotations

import json
import signal
import time
from contextlib import closing
from typing import Any

from lockstep.comm.group_source import GroupSource
from lockstep.errors import AuditFailed, Interrupted, NotSaved, NumericsError, Paused
from lockstep.runs.event import EpochDone, StepDone
from lockstep.runs.journal import Journal
from lockstep.runs.saving.due_steps import DueSteps
from lockstep.runs.train_state import Totals, TrainState
from lockstep.spec import Launch
from lockstep.spec.generation import Generation
from lockstep.train.dealt import Dealt
from lockstep.train.engine import Engine
from lockstep.train.handshake import prove_state
from lockstep.train.interrupt import Interrupt
from lockstep.train.result import Result


class Moved(Exception):
    """All workers leave the group after the same step, or a giver once it has given; others come after it."""


class Loop:
    """Runs what is left of a run, as one of its workers."""

    def __init__(
        self,
        dealt: Dealt,
        state: TrainState,
        launch: Launch,
        journal: Journal,
        interrupt: Interrupt,
        groups: GroupSource,
    ) -> None:
        setup = dealt.setup
        self._dealt, self._group = dealt, dealt.mesh.world
        self._setup, self._state, self._launch = setup, state, launch
        self._journal, self._interrupt, self._groups = journal, interrupt, groups
        state.step_in_epoch = min(state.step_in_epoch, self._steps)  # if images were removed since
        self._first_step, self._due = state.step, DueSteps(setup.run, state)
        self._is_new = True  # this generation is not reported yet

    def run(self) -> Result:
        """Train, evaluate and finish what is left of the run."""
        self._groups.settle()
        state, journal = self._state, self._journal
        if journal.found["summary"] and self._is_over:
            if not (self._generation and self._generation.changes):
                journal.notice(f"{journal.path} is finished already; nothing to do")
            return self._finish(journal.found["summary"], write=False)
        changes = self._generation.changes if self._generation else ()
        journal.start(state, self._steps, self._group.size, takes_over=bool(changes))
        halts = bool(self._generation and self._generation.halt)
        tells = self._launch.is_bound or self._setup.run.train.compress != "none"
        if changes and tells and not halts:
            journal.notice(self._dealt.explain_state(state, journal.undone))
        for line in self._dealt.told:
            journal.notice(line)
        if self._is_unsaved(self._due.last()):
            journal.saver.save(state)  # from here on a run that dies can be resumed
        if halts:
            self._report_generation()
            self._stop(signal.SIGTERM, "stopped because too few workers are left")
        try:
            while (told := self._train_stage()) is None:
                pass
        except (NumericsError, AuditFailed):
            prove_state(self._group, self._state)  # the fault may be in the state itself
            journal.saver.save(state, wait=True)
            raise
        self._report_generation()
        if state.scale and (text := state.scale.tell()):
            journal.notice(text)
        hashes = prove_state(self._group, self._state)
        self._dealt.make_whole(state)
        journal.saver.settle(wait=True)
        return self._finish(self._journal.summarize(self._state, self._group, hashes, told), write=True)

    def _train_stage(self) -> dict[str, Any] | None:
        """Train what is left of the epochs with one batch; after the last ones, what a summary tells."""
        state, train, dealt = self._state, self._setup.run.train, self._dealt.at(self._state.epoch)
        stop = next((s.epochs.stop for s in train.stages if state.epoch < s.epochs.stop), train.epochs)
        with (
            dealt.explain_memory(),
            closing(Engine(dealt, state, self._launch)) as engine,
        ):
            if "_evaluate" not in vars(self):  # it needs memory, too; its blocks are of the first batch
                self._evaluate = self._dealt.evaluator(self._launch.graph)
            while state.epoch < stop and not self._is_over:
                self._pause()
                self._train_epoch(engine)
                self._end_epoch()
            if self._is_over:
                return self._dealt.test(self._evaluate, state) | engine.tell(self._dealt.plan)
        if dealt.setup.lowering:
            dealt.setup.lowering.forget_networks()
        return None

    def _train_epoch(self, engine: Engine) -> None:
        state, run, journal = self._state, self._setup.run, self._journal
        last, batch = time.perf_counter(), run.train.batch_of(state.epoch)
        for result in engine.epoch(self._is_read_at, self._requests):
            images = batch * result.steps
            state.totals.loss += result.loss * result.steps
            state.totals.correct += result.correct
            state.totals.samples += images
            now = time.perf_counter()
            seconds, last = result.seconds or now - last, now
            done = StepDone(
                state.epoch,
                state.step_in_epoch,
                state.step,
                result.loss,
                result.correct / images if self._setup.is_classifier else None,
                result.lr,
                images / seconds,
                round(result.waited_s, 6),
                result.steps,
                result.scale,
                result.skipped,
            )
            journal.step(done, state)
            self._report_generation()
            if result.stop:
                self._stop(self._interrupt.agree(self._group))
            if self._due.asks():
                journal.saver.settle()
            if self._due.is_due() and state.step_in_epoch < self._steps:
                journal.saver.save(state)
                last = time.perf_counter()
            if result.move:
                raise Moved
            self._dealt.kept.follow(state)
        if state.step_in_epoch < self._steps:  # asked to leave before a step was begun
            if self._interrupt.signal:
                self._stop(self._interrupt.signal)
            raise Moved

    @property
    def _steps(self) -> int:
        """The steps of the current epoch."""
        return len(self._setup.store.train) // self._setup.run.train.batch_of(self._state.epoch)

    def _requests(self) -> tuple[bool, bool]:
        """Whether this worker is asked to stop, and whether it knows of a generation to move to."""
        return bool(self._interrupt.signal), self._groups.wants_to_move

    def _end_epoch(self) -> None:
        """Evaluate, move the cursor to the next epoch, report and save; no collective once it is noted."""
        state, totals = self._state, self._state.totals
        with self._dealt.averaged(state):
            evaluation = self._evaluate(state.model)
        done = EpochDone(
            state.epoch,
            state.step,
            totals.loss / (totals.samples // self._setup.run.train.batch_of(state.epoch)),
            totals.correct / totals.samples if self._setup.is_classifier else None,
            evaluation.loss,
            evaluation.accuracy,
            self._journal.epoch_pace.img_s,
            self._journal.epoch_pace.longest_wait(self._group)["data_wait_share"],
            state.note(evaluation.loss, evaluation.accuracy, evaluation.metrics, self._setup.run.evaluate),
            self._setup.store.chosen_by[0],
            evaluation.metrics,
        )
        state.epoch, state.step_in_epoch, state.totals = state.epoch + 1, 0, Totals()
        self._journal.epoch(done)
        self._journal.saver.save(state)

    @property
    def _is_over(self) -> bool:
        """Whether the last epoch is trained, or patience has run out; the same on every worker."""
        return self._setup.run.is_over(self._state.epoch, self._state.worse_epochs)

    def _is_unsaved(self, first: int) -> bool:
        """Whether there is no checkpoint of a step from `first` to the present; the same on every worker."""
        journal = self._journal
        saved = b"saved" if journal.is_open and journal.saver.is_saved(first, self._state.step) else b""
        return not self._group.broadcast_bytes(saved)

    def _is_read_at(self, step: int) -> bool:
        return self._due.is_due_at(step) or self._due.asks_at(step) or self._dealt.kept.is_due_at(step)

    @property
    def _generation(self) -> Generation | None:
        return self._groups.generation

    def _report_generation(self) -> None:
        """Report this generation once, after its first completed step or at its end."""
        if not self._is_new:
            return
        self._is_new = False
        if self._group.rank == 0:
            self._groups.confirm()
        self._journal.regroup(self._generation, self._first_step, self._group.size)

    def _stop(self, number: signal.Signals, cause: str = "") -> None:
        saved = self._journal.saver.save(self._state, wait=True)
        told = "the state is saved" if saved else "its state could NOT be saved, older checkpoints stay"
        raise Interrupted(
            f"{cause or f'stopped by {number.name}'} after step {self._state.step}; {told}: "
            f"go on with {self._way_on()}",
            number,
        )

    def _pause(self) -> None:
        """Stop before the next epoch, if no more are wanted for now; the state is saved already."""
        wanted, state = self._launch.stop_after_epochs, self._state
        if not wanted or state.epoch < wanted:
            return
        self._report_generation()
        self._journal.saver.settle(wait=True)
        if self._is_unsaved(state.step):  # that failed at the epoch's end
            self._stop(signal.SIGTERM, f"stopped by --stop-after-epochs {wanted}")
        raise Paused(
            f"stopped by --stop-after-epochs {wanted} after epoch {state.epoch} of "
            f"{self._setup.run.train.epochs}; the state is saved: go on with {self._way_on()}"
        )

    def _way_on(self) -> str:
        if self._setup.is_scripted:
            return f'the same script and lockstep.Launch(resume="{self._journal.path}")'
        return self._launch.resume_command(self._journal.path)

    def _finish(self, summary: dict[str, Any], write: bool) -> Result:
        """The result, once worker 0's summary is on disk; until then the others go on if a worker is lost."""
        summary = json.loads(self._group.broadcast_bytes(json.dumps(summary).encode()))
        self._setup.model.eval()
        lost = self._group.broadcast_bytes(
            self._journal.finish(summary, self._state, write).encode()
        ).decode()
        self._group.barrier()
        result = Result(self._journal.path, summary, self._setup.model, self._group.rank)
        if lost:
            raise NotSaved(
                f"the run is trained, but {lost} could NOT be written: free space on {result.directory} "
                f"and go on with {self._way_on()}: it ends with the same bits",
                result,
            )
        return result
