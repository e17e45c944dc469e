"""Kernels side by side: one often does not fill a GPU, or not all of its units."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache

import torch
from torch import Tensor

_STREAMS = 4


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
    current, others = torch.cuda.current_stream(device), _others(device)[: len(each) - 1]
    for stream in others:
        stream.wait_stream(current)
    found = []
    try:
        for number, lane in enumerate(each):
            with torch.cuda.stream((current, *others)[number % (len(others) + 1)]):
                found.append(compute(*lane))
    finally:
        for stream in others:
            current.wait_stream(stream)
    return found


def beside(device: torch.device, compute: Callable[[], None]) -> None:
    """Launch what reads results that are there, and writes what nobody reads or writes until `rejoin`."""
    if device.type != "cuda":
        compute()
        return
    stream = _others(device)[0]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        compute()


def rejoin(device: torch.device) -> None:
    """What comes later waits for all that runs `beside`."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).wait_stream(_others(device)[0])


@cache
def _others(device: torch.device) -> list[torch.cuda.Stream]:
    return [torch.cuda.Stream(device) for _ in range(_STREAMS - 1)]
