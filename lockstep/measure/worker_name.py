"""What a worker computes with, by name: a cluster and a profile of the same device have the same."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

_CPUINFO = Path("/proc/cpuinfo")
_PARTS = {"0xd0c": "Neoverse-N1", "0xd40": "Neoverse-V1", "0xd49": "Neoverse-N2", "0xd4f": "Neoverse-V2"}


def name_worker(device: torch.device) -> str:
    """The GPU's name, or the CPU's as Linux tells it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    lines = _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines() if _CPUINFO.exists() else []
    facts = dict(reversed([[part.strip() for part in line.split(":", 1)] for line in lines if ":" in line]))
    name = facts.get("model name") or _PARTS.get(facts.get("CPU part", ""))
    return name or f"{platform.machine()} CPU"
