"""An exchange between the workers of a lane, with what is computed while it travels."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from torch import Tensor

from lockstep.comm.group import Group
from lockstep.comm.transport import Round

Dealt = tuple[Tensor, Sequence[int]]  # a flat tensor, and how many of its elements are each worker's


def exchange_beside(group: Group, taken: Dealt, given: Dealt, meanwhile: Callable[[], None]) -> float:
    """Send and receive what is dealt to others; the seconds that `meanwhile` took.

    What is on a GPU is exchanged first.
    """
    took = 0.0

    def work() -> None:
        nonlocal took
        start = time.perf_counter()
        meanwhile()
        took = time.perf_counter() - start

    if given[0].is_cuda:
        group.all_to_all(taken[0], given[0], taken[1], given[1])
        work()
    else:  # a swap waits only for what is received in its first round: here nothing
        group.swap(Round(sent=_parts(*given)), work, Round(received=_parts(*taken)))
    return took


def _parts(flat: Tensor, counts: Sequence[int]) -> list[tuple[int, Tensor]]:
    """Each worker's part, of those who have one."""
    ends = pairwise(accumulate(counts, initial=0))
    return [(worker, flat[first:last]) for worker, (first, last) in enumerate(ends) if last > first]
