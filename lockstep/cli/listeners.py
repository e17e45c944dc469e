"""Attaches listeners to a run's events, progress, curves.png and trackers, and trains it."""

from __future__ import annotations

import os
import sys
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType

from lockstep.cli.batch.requeue import queue_again
from lockstep.cli.launch import note_rank
from lockstep.cli.watch.progress import Progress, tell_warnings
from lockstep.cli.watch.tracking import Tracking
from lockstep.data.own.data_processes import data_processes
from lockstep.elastic.process_control import end_with_parent, name_process
from lockstep.elastic.worker_groups import WorkerGroups
from lockstep.errors import GroupLost, Interrupted, LockstepError
from lockstep.report.layer_bars import draw_layers
from lockstep.report.plot import draw_curves
from lockstep.report.timeline import draw_timeline
from lockstep.runs.event import EpochDone, Event, Finished, Listener, Started
from lockstep.spec import Launch, Run
from lockstep.train.interrupt import Interrupt
from lockstep.train.result import Result
from lockstep.train.setup import Given
from lockstep.train.worker import fit

_DRAW_EVERY_S = 15.0
_PATIENCE_S = 3.0


def train_with_listeners(
    run: Run, launch: Launch, on_event: Listener | None = None, given: Given | None = None
) -> Result:
    """Train as one worker; worker 0 draws curves.png, and shows progress unless `on_event` is given."""
    try:
        given = given or Given()
        begin = partial(_begin_data_process, os.getpid())
        with data_processes(given.data, launch.data_processes, begin), ExitStack() as stack:
            watch = _Watch(stack, launch, on_event)
            try:
                result = fit(run, launch, watch, WorkerGroups, given)
            except Interrupted as stopped:  # before anything else is done, as the time may be short
                told = None if stopped.rank else queue_again(stopped, launch)
                if told:
                    print(f"lockstep: {told}", file=sys.stderr, flush=True)
                raise
        note_rank(result.rank)
        return result
    except GroupLost:
        time.sleep(_PATIENCE_S)  # meanwhile the launcher ends us, so that only the failed worker reports
        raise
    except LockstepError as error:
        note_rank(error.rank)
        if error.everywhere and launch.world and launch.world.launcher == "lockstep" and error.rank:
            raise SystemExit(0) from None  # worker 0 reports the error and sets the exit code
        raise


def _begin_data_process(parent: int) -> None:
    """What a process that reads a data set does first."""
    end_with_parent(parent)
    name_process("lockstep data")


class _Watch:
    """Passes events to all listeners; it makes them at the first event, as any worker may become worker 0."""

    def __init__(self, stack: ExitStack, launch: Launch, on_event: Listener | None) -> None:
        self._stack, self._launch, self._on_event = stack, launch, on_event
        self._listeners: list[Listener] = []

    def __call__(self, event: Event) -> None:
        if not self._listeners:
            self._gather()
        for listener in self._listeners:
            listener(event)

    def _gather(self) -> None:
        stack, launch = self._stack, self._launch
        if launch.world and launch.world.stdout_fd >= 0:
            os.dup2(launch.world.stdout_fd, 1)  # the launcher's stdout is for worker 0 only
        self._listeners.append(stack.enter_context(_Curves()))
        teller = self._on_event or self._find_teller()
        self._listeners.append(teller)
        if "tensorboard" in launch.track:
            from lockstep.cli.watch.tensorboard import TensorBoard

            self._listeners.append(stack.enter_context(TensorBoard()))
        if names := [name for name in launch.track if name != "tensorboard"]:
            self._listeners.append(stack.enter_context(Tracking(names, teller)))

    def _find_teller(self) -> Listener:
        launch = self._launch
        if launch.quiet:
            return tell_warnings
        # Open MPI gives every worker a pseudo-terminal, even if its own output goes to a file
        plain = bool(launch.world and launch.world.launcher == "mpirun")
        return self._stack.enter_context(Progress(sys.stdout, plain))


class _Curves:
    """Draws curves.png from time to time and at the end; a failure to draw never stops a run."""

    def __init__(self) -> None:
        self._directory: Path | None = None
        self._drawn_at = time.monotonic()

    def __enter__(self) -> _Curves:
        return self

    def __call__(self, event: Event) -> None:
        if isinstance(event, Started):
            self._directory = event.directory
        elif isinstance(event, EpochDone) and time.monotonic() - self._drawn_at > _DRAW_EVERY_S:
            self._draw()
        elif isinstance(event, Finished):
            if self._directory or not _is_drawn(event.directory):
                self._directory = event.directory
                self._draw()
            self._directory = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with Interrupt():  # a signal that is sent twice must not interrupt the drawing
            self._draw()

    def _draw(self) -> None:
        self._drawn_at = time.monotonic()
        try:
            if self._directory:
                draw_curves(self._directory)
                draw_timeline(self._directory)
                draw_layers(self._directory)
        except (OSError, ValueError, KeyError, TypeError) as error:
            print(f"lockstep: curves.png not drawn: {error}", file=sys.stderr)


def _is_drawn(directory: Path) -> bool:
    """Whether curves.png is newer than the summary: a worker may be killed between writing the two."""
    try:
        drawn, done = ((directory / name).stat().st_mtime_ns for name in ("curves.png", "summary.json"))
    except OSError:
        return False
    return drawn >= done
