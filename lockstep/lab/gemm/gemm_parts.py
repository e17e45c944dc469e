"""What a product costs beside the product: memory taken and given back, copies there and back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from lockstep.measure.probe_device import TimedRounds

_ROUNDS = 7


@dataclass(frozen=True)
class GemmPart:
    """Seconds of one part of a product of two size × size matrices that lie in the host's memory."""

    part: str
    has_pool: bool
    size: int
    time: TimedRounds


def measure_parts(
    device: torch.device, size: int, multiply: Callable[[Tensor, Tensor], Tensor]
) -> Iterator[GemmPart]:
    """Each part without a pool of memory, as a first program does it, and with one.

    On a GPU without a pool every matrix is allocated and freed by the driver, which waits for the GPU. On a
    CPU it is taken fresh from the system, and each page costs when it is first written.
    """
    host = [torch.randn(size, size) for _ in range(3)]
    for has_pool in (False, True):
        kept = [torch.empty(size, size, device=device) for _ in range(2)] if has_pool else []
        with _pool(device, has_pool):
            multiply(host[0].to(device), host[1].to(device))  # compiles, before anything is timed
            rounds = [_one_round(device, host, kept, multiply) for _ in range(_ROUNDS)]
        for place, part in enumerate(("allocate", "copy there", "multiply", "copy back", "free")):
            yield GemmPart(part, has_pool, size, TimedRounds(tuple(found[place] for found in rounds)))


def _one_round(
    device: torch.device, host: list[Tensor], kept: list[Tensor], multiply: Callable[[Tensor, Tensor], Tensor]
) -> tuple[float, ...]:
    marks = [_now(device)]
    there = (
        kept[:2]
        if device.type == "cpu" and kept
        else [torch.empty_like(each, device=device) for each in host[:2]]
    )
    marks.append(_now(device))
    for to, source in zip(there, host, strict=False):
        to.copy_(source)
    marks.append(_now(device))
    result = multiply(*there)
    marks.append(_now(device))
    host[2].copy_(result)
    marks.append(_now(device))
    del result, there
    marks.append(_now(device))
    return tuple(end - start for start, end in pairwise(marks))


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@contextmanager
def _pool(device: torch.device, is_on: bool) -> Iterator[None]:
    """Torch keeps a pool for each GPU; it can be told not to."""
    if device.type != "cuda" or is_on:
        yield
        return
    torch.cuda.memory.caching_allocator_enable(False)
    try:
        yield
    finally:
        torch.cuda.memory.caching_allocator_enable(True)
