"""How long each kind of layer computes in a call, forward and backward, from PyTorch's profiler."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

OTHER = "other"
_KINDS = {  # by a part of the operation's name, the first that is found
    "convolution": ("conv",),
    "pooling": ("pool",),
    "norm": ("norm",),
    "fully connected": ("linear", "addmm", "mm", "matmul"),
    "activation": ("relu", "threshold", "sigmoid", "tanh", "gelu", "silu", "clamp"),
}
KINDS = (*_KINDS, OTHER)


def time_by_kind(call: Callable[[], None], device: torch.device, rounds: int = 3) -> dict[str, float]:
    """Seconds of a call by kind: shares from the profiler, of a time that was measured without it."""
    call()
    times = sorted(_time_call(call, device) for _ in range(rounds))
    on_gpu = device.type == "cuda"
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it prints when it starts and stops
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=kinds, acc_events=True) as seen:
        _time_call(call, device)
    found = dict.fromkeys(KINDS, 0.0)
    for event in seen.key_averages():
        if event.device_type.name == "CPU":  # a GPU's kernels count for the operation that starts them
            spent = event.self_device_time_total if on_gpu else event.self_cpu_time_total
            found[kind_of(event.key)] += spent
    whole = sum(found.values()) or 1.0
    return {kind: times[len(times) // 2] * spent / whole for kind, spent in found.items()}


def kind_of(name: str) -> str:
    """The kind of layer that an operation belongs to, by its name."""
    low = name.lower()
    return next((kind for kind, parts in _KINDS.items() if any(part in low for part in parts)), OTHER)


def _time_call(call: Callable[[], None], device: torch.device) -> float:
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
