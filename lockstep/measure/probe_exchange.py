"""How long exchanges between the workers of one machine take, by kind and size. Part of `probe`.

Every function is called by all workers of the group; those that are not asked wait.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from lockstep.comm.exchange import ExchangeShape, make_exchange
from lockstep.comm.group import Group
from lockstep.comm.mesh import part_of
from lockstep.comm.transport import Round
from lockstep.comm.tree import all_heights
from lockstep.measure.probe_device import Figure
from lockstep.measure.probe_workers import make_product, worker_counts
from lockstep.spec.cluster import ExchangeTimes, LinkRate

_LANES = 8  # as most recipes have
_BATCH_S = 4e-3  # small exchanges are timed several at a time, for so long
_MOST_AT_ONCE = 100
_MOST_ROUNDS = 15
_SWAPS = 8  # of a round, each after some computing


@dataclass(frozen=True)
class Exchanges:
    """Measured rows for the cluster's file, and how they were got."""

    rows: tuple[ExchangeTimes, ...]
    how: str


def measure_exchanges(
    group: Group,
    device: torch.device,
    sizes: Sequence[int],
    budget_s: float,
    tell: Callable[[str], None],
) -> Exchanges:
    """Sums of gradients, gathers and messages between workers, by their bytes."""
    counts, rows = worker_counts(group.size), []
    kinds = ("reduce", "gather") if device.type == "cuda" else ("reduce", "gather", "swap")
    cases = [("send", 2), *((kind, count) for count in counts for kind in kinds)]
    parts = {
        count: part_of(group, f"probe of {count}", range(count)) for count in counts if group.rank < count
    }
    shortest, widest = 0, (1.0, 1.0)
    for kind, count in cases:
        tell(f"exchanges: {kind} among {count} workers")
        ms = []
        for size in sizes:
            if part := parts.get(count):
                measure = _time_swap if kind == "swap" else _time_exchange
                seconds = measure(part, device, kind, size, budget_s / len(cases) / len(sizes))
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
        f"tree over {_LANES} lanes or more; gather: bytes of all parts; send: there and back in turn; "
        f"swap: bytes of all parts, mean of {_SWAPS}, a product of two matrices before each"
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
    rounds = max(3, min(int(budget_s / (at_once * first)), _MOST_ROUNDS))
    _slowest(group, device, work, at_once)
    return [_slowest(group, device, work, at_once) for _ in range(rounds)]


def _time_swap(group: Group, device: torch.device, kind: str, num_bytes: int, budget_s: float) -> list[float]:
    """Seconds of one exchange within a layer in each round: workers come to it from computing.

    Its mean counts, as a lane has many: now one worker is late, now another, and threads wait for a core.
    """
    work, compute = _make_swap(group, device, num_bytes), make_product()

    def one_round() -> float:
        seconds = 0.0
        for _ in range(_SWAPS):
            compute()
            start = time.perf_counter()
            work()
            seconds += time.perf_counter() - start
        everyone = group.all_gather_bytes(json.dumps(seconds / _SWAPS).encode())
        return statistics.fmean(map(float, everyone))

    work()
    start = time.perf_counter()
    one_round()
    took = json.dumps(time.perf_counter() - start).encode()
    slowest = max(map(float, group.all_gather_bytes(took)))
    return [one_round() for _ in range(max(3, min(int(budget_s / slowest), _MOST_ROUNDS)))]


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


def _make_swap(group: Group, device: torch.device, num_bytes: int) -> Callable[[], object]:
    """Every worker sends its part to all others, as the layers of one lane do."""
    part = torch.zeros(max(num_bytes // 4 // group.size, 1), device=device)
    others = [rank for rank in range(group.size) if rank != group.rank]
    sent = Round(sent=[(rank, part) for rank in others])
    received = Round(received=[(rank, torch.empty_like(part)) for rank in others])
    return lambda: group.swap(sent, lambda: None, received)


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
