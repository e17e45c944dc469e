"""Times a call on a CPU or a GPU, again and again until a budget is spent."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from lockstep.kernels.cuda_graph import capture
from lockstep.measure.probe_device import TimedRounds

_LEAST, _MOST = 3, {"cpu": 50, "cuda": 1000}  # a GPU slows down once it is hot, so the budget is spent there
_ROUND_S = 1e-3  # calls of a GPU that are shorter are timed together


def time_call(call: Callable[[], object], device: torch.device, budget_s: float) -> TimedRounds:
    """The first call warms up; a call that alone takes longer than the budget is not repeated.

    On a GPU the calls are captured as a graph, so that what the host does between launches is not timed. A
    mode of torch, such as a default device, adds microseconds to every small call; here none is on.
    """
    no_modes: Any = torch._C.DisableTorchFunction
    with no_modes():
        return _time_plain(call, device, budget_s)


def _time_plain(call: Callable[[], object], device: torch.device, budget_s: float) -> TimedRounds:
    first, repeats = _once(call, device), 1
    if device.type == "cuda":
        first = _once(call, device)
    if first > budget_s:
        return TimedRounds((first,))
    if device.type == "cuda":
        repeats = max(1, min(20, int(_ROUND_S / first)))
        call = _repeat(call, repeats)
        with suppress(RuntimeError):  # what cannot be captured is timed with its launches
            call = capture(call, device, graph=True)
        call()
    found = list[float]()
    while len(found) < _LEAST or (sum(found) * repeats < budget_s and len(found) < _MOST[device.type]):
        found.append(_once(call, device) / repeats)
    return TimedRounds(tuple(found))


def _repeat(call: Callable[[], object], repeats: int) -> Callable[[], object]:
    def several() -> None:
        for _ in range(repeats):
            call()

    return several


def _once(call: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    event: Any = torch.cuda.Event
    begin, end = event(enable_timing=True), event(enable_timing=True)
    stream = torch.cuda.current_stream(device)
    begin.record(stream)
    call()
    end.record(stream)
    end.synchronize()
    return 1e-3 * float(begin.elapsed_time(end))
