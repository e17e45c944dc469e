"""Lanes of stock kernels side by side: one lane's often do not fill a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache

import torch
from torch import Tensor

_STREAMS = 4


def side_by_side(compute: Callable[..., Tensor], lanes: Iterable[tuple[Tensor, ...]]) -> list[Tensor]:
    """`compute` of every lane, on a GPU by several streams in turn; what comes later waits for all.

    What a stream of these allocates, only that stream gets again, and not before the current stream is done
    with it, since every call of this begins by waiting for it.
    """
    each = list(lanes)
    if len(each) == 1 or not each[0][0].is_cuda:
        return [compute(*lane) for lane in each]
    current = torch.cuda.current_stream()
    others = _others(current.device)[: len(each) - 1]
    for stream in others:
        stream.wait_stream(current)
    found = []
    for number, lane in enumerate(each):
        with torch.cuda.stream((current, *others)[number % (len(others) + 1)]):
            found.append(compute(*lane))
    for stream in others:
        current.wait_stream(stream)
    return found


@cache
def _others(device: torch.device) -> list[torch.cuda.Stream]:
    return [torch.cuda.Stream(device) for _ in range(_STREAMS - 1)]
