"""`lockstep train --tensorboard`: writes a run's events to TensorBoard files."""

from __future__ import annotations

from importlib.util import find_spec
from types import TracebackType
from typing import Any

from lockstep.errors import BadInput
from lockstep.runs.event import EpochDone, Event, Started, StepDone

_OF_A_STEP = ("loss", "accuracy", "lr", "img_s")
_OF_AN_EPOCH = ("_loss", "_accuracy")  # how the names of an epoch's scalars end, beside the user's metrics


def check_tensorboard() -> None:
    """Raise an error if TensorBoard is not installed, before any work starts."""
    if not find_spec("tensorboard"):
        raise BadInput("--tensorboard needs the extra: pip install 'lockstep-train[tensorboard]'")


class TensorBoard:
    """An event listener that writes scalars into the run's directory."""

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
            found = {name: getattr(event, name) for name in _OF_A_STEP}
            self._write({k: v for k, v in found.items() if v is not None}, event.step, "step")
        elif isinstance(event, EpochDone):
            own = tuple(f"{event.split}_{name}" for name in event.metrics)
            row = {
                name: value
                for name, value in event.row().items()
                if name.endswith(_OF_AN_EPOCH) or name in own
            }
            self._write(row, event.step, "epoch")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writer:
            self._writer.close()

    def _write(self, row: dict[str, float], step: int, group: str) -> None:
        for name, value in row.items():
            self._writer.add_scalar(f"{group}/{name}", value, step)
