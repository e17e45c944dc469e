"""`lockstep train --tensorboard`: a run's events as TensorBoard files."""

from __future__ import annotations

from importlib.util import find_spec
from types import TracebackType
from typing import Any

from lockstep.errors import BadInput
from lockstep.runs.event import EpochDone, Event, Started, StepDone


def check_tensorboard() -> None:
    """Refuse before any work if the extra is missing."""
    if not find_spec("tensorboard"):
        raise BadInput("--tensorboard needs the extra: pip install 'lockstep-train[tensorboard]'")


class TensorBoard:
    """A listener that writes scalars into the run's directory."""

    def __init__(self) -> None:
        check_tensorboard()
        from torch.utils.tensorboard import SummaryWriter

        self._make_writer: Any = SummaryWriter
        self._writer: Any = None

    def __enter__(self) -> TensorBoard:
        return self

    def __call__(self, event: Event) -> None:
        if isinstance(event, Started):
            self._writer = self._make_writer(str(event.directory / "tensorboard"))
        elif isinstance(event, StepDone):
            self._write(event, ("loss", "accuracy", "lr", "img_s"), "step")
        elif isinstance(event, EpochDone):
            self._write(event, ("train_loss", "train_accuracy", "test_loss", "test_accuracy"), "epoch")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writer:
            self._writer.close()

    def _write(self, event: StepDone | EpochDone, names: tuple[str, ...], group: str) -> None:
        for name in names:
            self._writer.add_scalar(f"{group}/{name}", getattr(event, name), event.step)
