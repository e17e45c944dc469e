"""`data.order` and `data.repeats`: how the samples of an epoch are shuffled, and how often each is there."""

from __future__ import annotations

import re

from lockstep.errors import SpecError

BALANCED = "balanced"  # every class as often as any other
_MOST_REPEATS = 64


def find_block(order: str) -> int:
    """The number of neighbours that are shuffled together; 0 if every sample is by itself."""
    if order in ("shuffled", BALANCED):
        return 0
    if not re.fullmatch(r"blocks:[1-9]\d{0,8}", order):
        raise SpecError(f"data.order={order} must be shuffled, balanced, or like blocks:256")
    return int(order.partition(":")[2])


def check_repeats(repeats: int, order: str) -> None:
    """Refuse a number of repetitions that cannot be."""
    if repeats > 1 and order == BALANCED:
        raise SpecError(f"data.repeats={repeats}: not with data.order=balanced, which repeats samples itself")
    if not 1 <= repeats <= _MOST_REPEATS:
        raise SpecError(f"data.repeats={repeats} must be from 1 (each sample once) to {_MOST_REPEATS}")
