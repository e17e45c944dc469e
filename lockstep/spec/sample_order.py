"""`data.order`: how the samples of an epoch are shuffled, one by one or by blocks of neighbours."""

from __future__ import annotations

import re

from lockstep.errors import SpecError


def find_block(order: str) -> int:
    """The number of neighbours that are shuffled together; 0 if every sample is by itself."""
    if order == "shuffled":
        return 0
    if not re.fullmatch(r"blocks:[1-9]\d{0,8}", order):
        raise SpecError(f"data.order={order} must be shuffled, or like blocks:256")
    return int(order.partition(":")[2])
