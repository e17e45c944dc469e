"""What compressing gradients takes of a worker, by `train.compress`. Part of `probe`.

A reducer of one worker does to the gradients of one lane all that training does, but for the exchange.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch

from lockstep.comm.bucket import ReducedTensor
from lockstep.comm.compress.feedback import Feedback
from lockstep.comm.group import Group
from lockstep.comm.reducer import Reducer
from lockstep.measure.probe_device import seconds_of
from lockstep.spec.cluster import CodecTime
from lockstep.spec.rule.compression import read_compression

SCHEMES = ("bf16", "fp8", "int8", "top:0.01", "top:0.1", "rank:1", "rank:4")
_LEAST_ROUNDS = 3


@dataclass(frozen=True)
class CodecTimes:
    """Measured rows for the cluster's file, and how they were got."""

    rows: tuple[CodecTime, ...]
    how: str


def measure_codecs(device: torch.device, side: int, budget_s: float) -> CodecTimes:
    """Of every kind of compression, by the gradient of a square matrix with so many rows."""
    maker = torch.Generator().manual_seed(0)
    grad = (torch.randn(side, side, generator=maker) * 1e-3).to(device)
    rows, fewest = [], 0
    for scheme in SCHEMES:
        rounds = _time_rounds(scheme, grad, budget_s / len(SCHEMES))
        lane, mean, commit = (
            1e9 * statistics.median(part) / grad.numel() for part in zip(*rounds, strict=True)
        )
        rows.append(CodecTime(scheme, lane, mean, commit))
        fewest = min(fewest or len(rounds), len(rounds))
    threads = ", one thread" if device.type == "cpu" else ""
    how = (
        f"a {side} x {side} matrix as one lane's gradient at one worker{threads}, medians of {fewest} rounds"
    )
    return CodecTimes(tuple(rows), f"{how} or more")


def _time_rounds(scheme: str, grad: torch.Tensor, budget_s: float) -> list[tuple[float, float, float]]:
    """Seconds of a lane, of the mean and of the commit in each round, after one that does not count."""
    compression, group = read_compression(scheme), Group()
    assert compression
    feedback = Feedback(compression, {"matrix": grad}, 1, group)
    reducer = Reducer(group, 1, [ReducedTensor(grad, None, "matrix")], feedback=feedback)
    found, end = list[tuple[float, float, float]](), float("inf")
    while len(found) <= _LEAST_ROUNDS or time.perf_counter() < end:
        reducer.begin()
        parts = (lambda: reducer.add([grad]), reducer.finish, reducer.commit)
        lane_s, mean_s, commit_s = (seconds_of(part, grad.device) for part in parts)
        found.append((lane_s, mean_s, commit_s))
        end = min(end, time.perf_counter() + budget_s)
    return found[1:]
