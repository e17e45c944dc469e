"""How many operations a second a device could do at most, whatever the program."""

from __future__ import annotations

import ctypes
import os
import time
from functools import cache
from pathlib import Path

import torch

from lockstep.errors import LockstepError
from lockstep.native.c_library import compile_c
from lockstep.native.cuda_kernel import call_driver

_CLOCK_KHZ = 13  # CU_DEVICE_ATTRIBUTE_CLOCK_RATE
# operations that a multiprocessor ends in a clock, by compute capability: fp32, and bf16 by tensor cores
_A_CLOCK = {(8, 0): (128, 2048), (8, 6): (256, 512), (8, 9): (256, 1024), (9, 0): (256, 4096)}


@cache
def limit_gflop_s(device: torch.device, precision: torch.dtype, threads: int = 1) -> float | None:
    """Of a GPU by its highest clock; of a CPU as a loop of multiply-adds in registers reaches; or unknown."""
    if device.type == "cuda":
        found = _A_CLOCK.get(torch.cuda.get_device_capability(device))
        if found is None or precision not in {torch.float32, torch.bfloat16}:
            return None
        clock_khz = ctypes.c_int()
        call_driver("cuDeviceGetAttribute", ctypes.byref(clock_khz), _CLOCK_KHZ, device.index or 0)
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        return 1e-6 * clock_khz.value * processors * found[precision == torch.bfloat16]
    if precision != torch.float32:
        return None
    try:
        return min(threads, len(os.sched_getaffinity(0))) * _one_core()
    except LockstepError:
        return None


@cache
def _one_core() -> float:
    library = compile_c(Path(__file__).with_name("multiply_adds.c").read_text(encoding="utf-8"))
    library.multiply_adds.restype = ctypes.c_double
    best, rounds = 0.0, 2_000_000
    for _ in range(5):
        start = time.perf_counter()
        operations = library.multiply_adds(ctypes.c_long(rounds))
        best = max(best, 1e-9 * operations / (time.perf_counter() - start))
    return best
