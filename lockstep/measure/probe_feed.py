"""How fast a machine reads and decodes images: a file from its disk, and a decoder that the caller gives.

Part of `probe`.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from lockstep.measure.probe_device import Figure, TimedRounds, time_rounds

_READ_BYTES, _DISK_ROUNDS = 4 << 20, 3


def measure_disk(folder: Path, num_bytes: int) -> Figure:
    """MB/s of a file that is written to `folder`, and dropped from the system's cache before it is read."""
    block = os.urandom(_READ_BYTES)
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        for _ in range(num_bytes // _READ_BYTES):
            file.write(block)
        os.fsync(file.fileno())
        seconds = [_read_cold(file.fileno()) for _ in range(_DISK_ROUNDS)]
    rounds = TimedRounds(tuple(seconds))
    what = f"{num_bytes // _READ_BYTES * _READ_BYTES >> 20} MiB in the folder of this file"
    how = f"read of {what}, after the system was asked to drop it from memory; {rounds.told}"
    return Figure(1e-6 * num_bytes / statistics.median(seconds), how)


def _read_cold(descriptor: int) -> float:
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.lseek(descriptor, 0, os.SEEK_SET)
    start = time.perf_counter()
    while os.read(descriptor, _READ_BYTES):
        pass
    return time.perf_counter() - start


def measure_decoding(decode: Callable[[], object], budget_s: float) -> Figure:
    """Images a second that one core decodes."""
    rounds = time_rounds(decode, torch.device("cpu"), budget_s)
    return Figure(1 / rounds.median, f"one core, one JPEG of 500 x 375 to a crop of 224; {rounds.told}")
