"""A training run with someone watching: events become progress, curves and TensorBoard files."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from lockstep.cli.progress import Progress
from lockstep.errors import GroupLost, LockstepError
from lockstep.report.plot import draw_curves
from lockstep.spec import Launch, Run
from lockstep.train.event import EpochDone, Event, Finished, Listener, Started
from lockstep.train.loop import Result
from lockstep.train.worker import fit

if TYPE_CHECKING:
    from torch import nn

    from lockstep.train.loss import Loss

_DRAW_EVERY_S = 15.0
_PATIENCE_S = 3.0


def run_session(
    run: Run,
    launch: Launch,
    on_event: Listener | None,
    *,
    model: nn.Module | None = None,
    data: Any = None,
    loss: Loss | None = None,
) -> Result:
    """Train as one worker; worker 0 draws curves.png and shows progress, unless the caller listens."""
    try:
        with ExitStack() as stack:
            tell = _watch(stack, launch, on_event) if launch.rank == 0 else _ignore
            return fit(run, launch, tell, model=model, data=data, loss=loss)
    except GroupLost:
        time.sleep(_PATIENCE_S)  # the launcher ends us now, so that only the worker that failed is heard
        raise
    except LockstepError as error:
        if error.everywhere and launch.world and launch.world.launcher == "lockstep" and launch.rank:
            raise SystemExit(0) from None  # worker 0 says it and gives the code
        raise


def _watch(stack: ExitStack, launch: Launch, on_event: Listener | None) -> Listener:
    """Everyone who listens to worker 0."""
    listeners: list[Listener] = [stack.enter_context(_Curves())]
    if launch.tensorboard:
        from lockstep.cli.tensorboard import TensorBoard

        listeners.append(stack.enter_context(TensorBoard()))
    listeners.append(on_event or stack.enter_context(Progress(sys.stdout)))

    def tell(event: Event) -> None:
        for listener in listeners:
            listener(event)

    return tell


def _ignore(event: Event) -> None:
    """What other workers than 0 do with events."""


class _Curves:
    """Draws curves.png now and then and at the end; a picture that cannot be drawn never stops a run."""

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
            self._draw()
            self._directory = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._draw()

    def _draw(self) -> None:
        self._drawn_at = time.monotonic()
        try:
            if self._directory:
                draw_curves(self._directory)
        except (OSError, ValueError, KeyError, TypeError) as error:
            print(f"lockstep: curves.png not drawn: {error}", file=sys.stderr)
