"""Kernels side by side: one often does not fill a GPU, or only one of its parts.

Steps are captured on a stream of high priority, and so are all streams here but the one that gives way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

_Launch = Callable[[Callable[[], None]], None]
_STREAMS = 4
_BACKGROUND = _STREAMS  # the number of a stream whose kernels take what others leave


def side_by_side(compute: Callable[..., Tensor], lanes: Iterable[tuple[Tensor, ...]]) -> list[Tensor]:
    """`compute` of every lane, on a GPU by several streams in turn; what comes later waits for all.

    What a stream of these allocates is given to that stream again, and not before the current stream is done
    with it: every call of this begins by waiting for the current stream, which is always the same one, or one
    that waits for it.
    """
    each = list(lanes)
    device = each[0][0].device
    if len(each) == 1 or device.type != "cuda":
        return [compute(*lane) for lane in each]
    current = torch.cuda.current_stream(device)
    others = [stream(device, number) for number in range(1, min(_STREAMS, len(each)))]
    for other in others:
        other.wait_stream(current)
    found = []
    try:
        for number, lane in enumerate(each):
            with torch.cuda.stream((current, *others)[number % (len(others) + 1)]):
                found.append(compute(*lane))
    finally:
        for other in others:
            current.wait_stream(other)
    return found


@contextmanager
def beside(device: torch.device, *, gives_way: bool = False) -> Iterator[_Launch]:
    """What launches kernels beside those of the current stream; what comes after the block waits for all.

    They read results that are there, and write what nothing else reads or writes in the block.
    """
    if device.type != "cuda":
        yield lambda compute: compute()
        return
    current, other = torch.cuda.current_stream(device), stream(device, _BACKGROUND if gives_way else 1)

    def launch(compute: Callable[[], None]) -> None:
        other.wait_stream(current)
        with torch.cuda.stream(other):
            compute()

    try:
        yield launch
    finally:
        current.wait_stream(other)


@cache
def stream(device: torch.device, number: int = 0) -> torch.cuda.Stream:
    """The one with this number; 0 is what a step is captured on."""
    return torch.cuda.Stream(device, priority=0 if number == _BACKGROUND else -1)
