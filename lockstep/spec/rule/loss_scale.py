"""The scale of the loss of a run in fp16: what the backward pass begins with, and when it changes.

fp16 has no numbers below 6e-8 and none above 65504. So the loss is multiplied by a power of two, and every
lane's gradients by its inverse, which is exact. It is halved after a step whose gradients are not finite, and
doubled after `train.scale_growth` others in a row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from lockstep.spec.field import require

PRECISION = "fp16"  # the precision that needs it
START, GROWTH = 65536.0, 2000  # as torch.amp has them
LEAST, MOST = 1.0, 2.0**40


@dataclass(frozen=True)
class LossScale:
    """The scale of the next step, and what it hangs on."""

    value: float = START
    steps: int = 0  # that were taken since it moved
    skipped: int = 0  # steps of the run that were not taken

    @property
    def inverse(self) -> float:
        return 1.0 / self.value

    @property
    def can_shrink(self) -> bool:
        """Whether a smaller scale may help against gradients that are not finite."""
        return self.value > LEAST

    def tell(self) -> str:
        """A line for people about steps that were not taken; empty if all were."""
        steps = f"{self.skipped} step{'s' * (self.skipped > 1)}"
        text = f"{steps} overflowed in {PRECISION} and changed no weight; the loss scale is {self.value:g}"
        return text if self.skipped else ""

    def after(self, overflow: bool, growth: int) -> LossScale:
        """The scale of the step after this one."""
        if overflow:
            return LossScale(self.value / 2, 0, self.skipped + 1)
        if self.steps + 1 < growth:
            return replace(self, steps=self.steps + 1)
        return replace(self, value=min(2 * self.value, MOST), steps=0)


def begin_scale(precision: str, start: float) -> LossScale | None:
    """The scale of a run's first step; None for precisions that need none."""
    return LossScale(start) if precision == PRECISION else None


def check_scale(precision: str, start: float, growth: int, local_steps: int) -> None:
    """Refuse numbers that are none, and where nothing is scaled."""
    is_power = LEAST <= start <= MOST and math.frexp(start)[0] == 0.5
    require(is_power, "train.loss_scale", start, "must be a power of two from 1 to 2^40, such as 65536")
    require(growth >= 1, "train.scale_growth", growth, "must be at least 1")
    if precision != PRECISION:
        rule = f"works with train.precision=fp16 only, which is {precision}: leave it out"
        require(start == START, "train.loss_scale", start, rule)
        require(growth == GROWTH, "train.scale_growth", growth, rule)
    rule = (
        "does not work with train.precision=fp16, as a lane's own steps cannot be undone after one that "
        "overflows: use train.precision=bf16, or train.local_steps=1"
    )
    require(precision != PRECISION or local_steps == 1, "train.local_steps", local_steps, rule)
