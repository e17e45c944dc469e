"""Times a call on a CPU or a GPU, again and again until a budget is spent."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from lockstep.measure.probe_device import TimedRounds

_LEAST, _MOST = 3, 50


def time_call(call: Callable[[], object], device: torch.device, budget_s: float) -> TimedRounds:
    """The first call warms up; a call that alone takes longer than the budget is not repeated."""
    first = _once(call, device)
    if first > budget_s:
        return TimedRounds((first,))
    found = list[float]()
    while len(found) < _LEAST or (sum(found) < budget_s and len(found) < _MOST):
        found.append(_once(call, device))
    return TimedRounds(tuple(found))


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
