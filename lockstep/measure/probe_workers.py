"""What workers of one machine cost each other by computing side by side.

Part of `probe`. Every function is called by all workers of the group; those that are not asked wait.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from lockstep.comm.group import Group

_PRODUCT_SIDE = 384
_IMAGES, _CHANNELS, _FILTERS, _ROWS = 16, 32, 64, 24  # of the convolution that is trained


@dataclass(frozen=True)
class Slowdown:
    """By the number of workers that compute at once, from one."""

    ratios: tuple[float, ...]
    how: str


def worker_counts(most: int) -> list[int]:
    """How many workers are tried: 2, 3, 4, then powers of two, and all."""
    powers = [1 << power for power in range(3, most.bit_length())]
    return sorted({count for count in (2, 3, 4, *powers, most) if 2 <= count <= most})


def measure_slowdown(group: Group, device: torch.device, budget_s: float) -> Slowdown:
    """How much longer the same computing takes while several workers do it."""
    if device.type != "cpu":
        return Slowdown((1.0,), "not measured: every worker has a GPU of its own")
    parts = {"product": make_product(), "convolution step": _convolution_step()}
    counts, told = [1, *worker_counts(group.size)], []
    alone: dict[str, float] = {}
    measured: dict[int, float] = {}
    for count in counts:
        medians = {
            name: _together(group, count, work, budget_s / len(counts) / len(parts))
            for name, work in parts.items()
        }
        alone = alone or medians
        ratios = {name: medians[name] / alone[name] for name in parts}
        measured[count] = max(statistics.fmean(ratios.values()), 1.0)
        if count > 1:
            shares = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
            told.append(f"{count} workers: {shares}")
    how = f"medians over those of one worker alone, mean of both parts; {'; '.join(told) or 'one worker'}"
    return Slowdown(_fill(measured, group.size), how)


def make_product() -> Callable[[], object]:
    """A product of two matrices: some milliseconds of a core."""
    left, right = (torch.rand(_PRODUCT_SIDE, _PRODUCT_SIDE) for _ in range(2))
    out = torch.empty_like(left)
    return lambda: torch.mm(left, right, out=out)


def _convolution_step() -> Callable[[], object]:
    """A convolution with pooling, forward and backward, whose tensors do not fit a core's cache."""
    images = torch.rand(_IMAGES, _CHANNELS, _ROWS, _ROWS, requires_grad=True)
    weight = torch.rand(_FILTERS, _CHANNELS, 3, 3, requires_grad=True)

    def step() -> object:
        out = F.max_pool2d(F.conv2d(images, weight, padding=1).relu(), 2)
        return torch.autograd.grad(out.sum(), (images, weight))

    return step


def _together(group: Group, count: int, work: Callable[[], object], budget_s: float) -> float:
    """The median seconds of the work, done by the first `count` workers at once, over all of them."""
    group.barrier()
    found: list[float] = []
    if group.rank < count:
        work()
        end = time.perf_counter() + budget_s
        while len(found) < 5 or time.perf_counter() < end:
            start = time.perf_counter()
            work()
            found.append(time.perf_counter() - start)
    everyone = group.all_gather_bytes(json.dumps(found).encode())
    return statistics.median(float(seconds) for text in everyone for seconds in json.loads(text))


def _fill(measured: dict[int, float], most: int) -> tuple[float, ...]:
    """A ratio for each number of workers; between two that were measured by a straight line."""
    counts, filled = sorted(measured), []
    for count in range(1, most + 1):
        high = next(each for each in counts if each >= count)
        low = max(each for each in counts if each <= count)
        share = (count - low) / (high - low) if high > low else 0.0
        filled.append(measured[low] + share * (measured[high] - measured[low]))
    return tuple(filled)
