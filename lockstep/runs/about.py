"""Facts about a run that its summary and log report: model, data, identity, and how fast it trains."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.spec import Run
from lockstep.spec.identity import Identity


@dataclass
class Pace:
    """Images trained by this worker's groups, the time they took, and how much of it was waiting for data.

    It goes on from one generation to the next.
    """

    images: int = 0
    seconds: float = 0.0
    waited_s: float = 0.0

    def add(self, images: int, seconds: float, waited_s: float) -> None:
        self.images, self.seconds = self.images + images, self.seconds + seconds
        self.waited_s += waited_s

    @property
    def img_s(self) -> float:
        return self.images / max(self.seconds, 1e-9)

    @property
    def wait_share(self) -> float:
        """How much of the time was waiting for data, 0 to 1."""
        return min(self.waited_s / max(self.seconds, 1e-9), 1.0)


@dataclass(frozen=True)
class About:
    """What a journal says of its run."""

    run: Run
    identity: Identity
    model: str  # the Run's name for it, or the class of a module of the user's
    data: str
    num_params: int
    num_train: int
    num_test: int
    num_val: int  # 0 where the test images serve for both
    split: str  # the images that every epoch is evaluated on
    notices: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
