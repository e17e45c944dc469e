"""`lockstep train --track tensorboard`: writes a run's events to TensorBoard files."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from lockstep.cli.watch.follow import scalars
from lockstep.runs.event import EpochDone, Event, Started, StepDone


class TensorBoard:
    """An event listener that writes scalars into the run's directory."""

    def __init__(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._make_writer: Any = SummaryWriter
        self._writer: Any = None

    def __enter__(self) -> TensorBoard:
        return self

    def __call__(self, event: Event) -> None:
        if isinstance(event, Started):
            self._writer = self._make_writer(str(event.directory / "tensorboard"))
        elif isinstance(event, StepDone):
            self._write(event.row(), event.step, "step")
        elif isinstance(event, EpochDone):
            self._write(event.row(), event.step, "epoch")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writer:
            self._writer.close()

    def _write(self, row: dict[str, Any], step: int, group: str) -> None:
        for name, value in scalars(row).items():
            self._writer.add_scalar(f"{group}/{name}", value, step)
