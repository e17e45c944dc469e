"""Facts about a run that its summary and log report: model, data, identity, and how fast it trains."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from lockstep.comm.group import Group
from lockstep.spec import Run
from lockstep.spec.identity import Identity


@dataclass
class Pace:
    """The number of images trained, the time it took, and how much of that was spent waiting for data.

    It keeps counting when the generation of workers changes.
    """

    images: int = 0
    seconds: float = 0.0
    waited_s: float = 0.0
    steps: int = 0

    def add(self, images: int, seconds: float, waited_s: float, steps: int) -> None:
        self.images, self.seconds = self.images + images, self.seconds + seconds
        self.waited_s, self.steps = self.waited_s + waited_s, self.steps + steps

    @property
    def img_s(self) -> float:
        return self.images / max(self.seconds, 1e-9)

    @property
    def wait_share(self) -> float:
        """The fraction of the time that was spent waiting for data, 0 to 1."""
        return min(self.waited_s / max(self.seconds, 1e-9), 1.0)

    def longest_wait(self, group: Group) -> dict[str, float]:
        """Seconds, seconds a step and share of the worker that waited longest for data. A collective."""
        mine = [self.waited_s, self.waited_s / max(self.steps, 1), self.wait_share]
        every = map(json.loads, group.all_gather_bytes(json.dumps(mine).encode()))
        return dict(zip(("data_wait_s", "data_wait_step_s", "data_wait_share"), max(every), strict=True))


def about_row(row: dict[str, Any]) -> tuple[Any, Any, Any]:
    """The key that identifies a row in its file."""
    return row.get("kind"), row["step"], row.get("generation")


@dataclass(frozen=True)
class About:
    """The facts about a run that its journal reports."""

    run: Run
    identity: Identity
    model: str  # its name in the Run, or the class of a user's own module
    data: str
    num_params: int
    num_train: int
    num_test: int
    num_val: int  # 0 if there are no validation images beside the test images
    split: str  # name of the split that every epoch is evaluated on
    notices: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
