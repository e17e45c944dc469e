"""What workers of one machine cost each other: computing side by side, and exchanges by kind and size.

Part of `probe`. Every function is called by all workers of the group; those that are not asked wait.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from lockstep.comm.exchange import ExchangeShape, make_exchange
from lockstep.comm.group import Group
from lockstep.comm.mesh import part_of
from lockstep.comm.tree import all_heights
from lockstep.measure.probe_device import Figure
from lockstep.spec.cluster import ExchangeTimes, LinkRate

_PRODUCT_SIDE = 384
_IMAGES, _CHANNELS, _FILTERS, _ROWS = 16, 32, 64, 24  # of the convolution that is trained
_LANES = 8  # as most recipes have
_BATCH_S = 4e-3  # small exchanges are timed several at a time, for so long
_MOST_AT_ONCE = 100


@dataclass(frozen=True)
class Slowdown:
    """By the number of workers that compute at once, from one."""

    ratios: tuple[float, ...]
    how: str


@dataclass(frozen=True)
class Exchanges:
    """Measured rows for the cluster's file, and how they were got."""

    rows: tuple[ExchangeTimes, ...]
    how: str


def worker_counts(most: int) -> list[int]:
    """How many workers are tried: 2, 3, 4, then powers of two, and all."""
    powers = [1 << power for power in range(3, most.bit_length())]
    return sorted({count for count in (2, 3, 4, *powers, most) if 2 <= count <= most})


def measure_slowdown(group: Group, device: torch.device, budget_s: float) -> Slowdown:
    """How much longer the same computing takes while several workers do it."""
    if device.type != "cpu":
        return Slowdown((1.0,), "not measured: every worker has a GPU of its own")
    parts = {"product": _product(), "convolution step": _convolution_step()}
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


def _product() -> Callable[[], object]:
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


def measure_exchanges(
    group: Group,
    device: torch.device,
    sizes: Sequence[int],
    budget_s: float,
    tell: Callable[[str], None],
) -> Exchanges:
    """Sums of gradients, gathers and messages between workers, by their bytes."""
    counts, rows = worker_counts(group.size), []
    cases = [("send", 2), *((kind, count) for count in counts for kind in ("reduce", "gather"))]
    parts = {
        count: part_of(group, f"probe of {count}", range(count)) for count in counts if group.rank < count
    }
    shortest, widest = 0, (1.0, 1.0)
    for kind, count in cases:
        tell(f"exchanges: {kind} among {count} workers")
        ms = []
        for size in sizes:
            if part := parts.get(count):
                seconds = _time_exchange(part, device, kind, size, budget_s / len(cases) / len(sizes))
                median = statistics.median(seconds)
                ms.append(1e3 * median)
                widest = min(widest[0], min(seconds) / median), max(widest[1], max(seconds) / median)
                shortest = min(shortest or len(seconds), len(seconds))
            group.barrier()
        if group.rank < count:
            rows.append(ExchangeTimes(kind, count, tuple(size / 1e6 for size in sizes), tuple(ms)))
    how = (
        f"{group.backend}, between processes of this machine; the slowest worker's time, medians of "
        f"{shortest} rounds or more, {widest[0]:.2f} to {widest[1]:.2f} of the median; reduce: the lane "
        f"tree over {_LANES} lanes or more; gather: bytes of all parts; send: there and back in turn"
    )
    return Exchanges(tuple(rows), how)


def _time_exchange(
    group: Group, device: torch.device, kind: str, num_bytes: int, budget_s: float
) -> list[float]:
    """Seconds of one exchange in each round, of the slowest worker."""
    work = _WORK[kind](group, device, num_bytes)
    _slowest(group, device, work, 1)  # the first has memory to allocate
    first = max(_slowest(group, device, work, 1), 1e-6)
    at_once = max(1, min(int(_BATCH_S / first), _MOST_AT_ONCE))
    rounds = max(3, min(int(budget_s / (at_once * first)), 15))
    _slowest(group, device, work, at_once)
    return [_slowest(group, device, work, at_once) for _ in range(rounds)]


def _slowest(group: Group, device: torch.device, work: Callable[[], object], at_once: int) -> float:
    """Seconds of an exchange, several one after another; every worker gets the same number."""
    group.barrier()
    start = time.perf_counter()
    for _ in range(at_once):
        work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    mine = repr((time.perf_counter() - start) / at_once)
    return max(float(text) for text in group.all_gather_bytes(mine.encode()))


def _make_reduce(group: Group, device: torch.device, num_bytes: int) -> Callable[[], object]:
    lanes = max(_LANES, 1 << (group.size - 1).bit_length())
    shape = ExchangeShape(all_heights(lanes, group.size), num_bytes // 4, torch.float32, None, device)
    return make_exchange(group, shape).run


def _make_gather(group: Group, device: torch.device, num_bytes: int) -> Callable[[], object]:
    part = torch.zeros(max(num_bytes // 4 // group.size, 1), device=device)
    whole = torch.zeros(group.size, len(part), device=device)
    return lambda: group.all_gather(whole, part)


def _make_send(group: Group, device: torch.device, num_bytes: int) -> Callable[[], object]:
    """To and fro in turn, so that twice a call is there and back."""
    tensor, turn = torch.zeros(num_bytes // 4, device=device), [0]

    def send() -> None:
        source, turn[0] = turn[0], 1 - turn[0]
        if group.rank == source:
            group.send(tensor, 1 - source)
        else:
            group.recv(torch.empty_like(tensor), source)

    return send


_WORK = {"reduce": _make_reduce, "gather": _make_gather, "send": _make_send}


def fit_link(row: ExchangeTimes) -> tuple[LinkRate, Figure]:
    """Latency and rate that are nearest to measured messages, by relative error; the figure is that error."""
    points = [(1e6 * mb, 1e-3 * ms) for mb, ms in zip(row.mb, row.ms, strict=True)]
    weights = [seconds**-2 for _, seconds in points]
    total = sum(weights)
    mean_x, mean_y = (
        sum(weight * point[i] for weight, point in zip(weights, points, strict=True)) / total for i in (0, 1)
    )
    pairs = list(zip(weights, points, strict=True))
    across = sum(weight * (x - mean_x) ** 2 for weight, (x, _) in pairs)
    slope = sum(weight * (x - mean_x) * (y - mean_y) for weight, (x, y) in pairs) / across
    slope = max(slope, 1e-15)
    latency = max(mean_y - slope * mean_x, 0.0)
    errors = [abs(latency + slope * x - y) / y for x, y in points]
    link = LinkRate(1e6 * latency, 1e-9 / slope)
    return link, Figure(max(errors), f"fit to `send`; at most {100 * max(errors):.0f} % off")
