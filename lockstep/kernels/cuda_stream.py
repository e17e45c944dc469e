"""CUDA streams: starts kernels that do not depend on each other side by side.

The stream that steps are captured on has high priority. So have all streams here except the background one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

_Launch = Callable[[Callable[[], None]], None]
_STREAMS = 4
_BACKGROUND = _STREAMS  # the number of the stream with low priority


def side_by_side(compute: Callable[..., Tensor], lanes: Iterable[tuple[Tensor, ...]]) -> list[Tensor]:
    """Call `compute` for every lane, on a GPU by several streams in turn; the current stream waits for all.

    torch's allocator gives freed memory back to the stream that allocated it. A side stream could therefore
    overwrite a freed result while the current stream still reads it. This cannot happen, because every call
    first lets the side streams wait for the current stream. The current stream is always the same one, or one
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
    """Yield a function that launches kernels on a second stream; after the block the current stream waits.

    A kernel that is launched so may read everything that was computed before. Nothing else in the block may
    read or write its output. With `gives_way` the second stream has low priority.
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
    """The CUDA stream with this number; steps are captured on number 0."""
    return torch.cuda.Stream(device, priority=0 if number == _BACKGROUND else -1)  # type: ignore[no-untyped-call]
