"""The memory that this process takes, on its GPU or, on Linux, on the host."""

from __future__ import annotations

from pathlib import Path

import torch


def peak_bytes(device: torch.device) -> int:
    """The most that was in use at one time: by torch on a GPU; by the whole process on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _status("VmHWM")


def used_bytes(device: torch.device) -> int:
    """What is in use now."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else _status("VmRSS")


def _status(key: str) -> int:
    """A line of this process's status: since its own start, unlike what getrusage gives a child."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))
