"""How fast one worker's device is: products by precision, copies, the start of an operation; its memory.

Part of `probe`. A worker on a CPU has one thread, so a product is computed by one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

from lockstep.kernels.numerics import precision_kept, set_precision

_SIDES = {"cpu": (128, 256, 512, 1024, 2048), "cuda": (2048, 4096, 8192)}  # of square products
_COPY_BYTES = {"cpu": 128 << 20, "cuda": 1 << 30}
_LAUNCHES = 500
_LEAST_ROUNDS = 5


@dataclass(frozen=True)
class TimedRounds:
    """Seconds of the same work, measured several times."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def told(self) -> str:
        """How many, and how far they spread around their median."""
        low, high = (edge(self.seconds) / self.median for edge in (min, max))
        return f"n = {len(self.seconds)}, {low:.2f} to {high:.2f} of the median"


@dataclass(frozen=True)
class Figure:
    """A measured rate or time, and how it was got."""

    value: float
    how: str


def time_rounds(work: Callable[[], object], device: torch.device, budget_s: float) -> TimedRounds:
    """The work's seconds, again and again for `budget_s`, after one round that does not count."""
    seconds_of(work, device)
    found: list[float] = []
    end = time.perf_counter() + budget_s
    while len(found) < _LEAST_ROUNDS or time.perf_counter() < end:
        found.append(seconds_of(work, device))
    return TimedRounds(tuple(found))


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """How long it takes, until the device has done it."""
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def measure_products(device: torch.device, budget_s: float) -> dict[str, Figure]:
    """GFLOP/s of large square products by precision."""
    kinds = {"fp32": torch.float32, "bf16": torch.bfloat16}
    if device.type == "cuda":
        kinds["tf32"] = torch.float32
    found = {}
    with precision_kept():
        for name, dtype in kinds.items():
            set_precision(tf32=name == "tf32")
            found[name] = _measure_product(device, dtype, budget_s / len(kinds))
    return found


def _measure_product(device: torch.device, dtype: torch.dtype, budget_s: float) -> Figure:
    """By the largest product of which several fit the time."""
    side, seconds = 0, 0.0
    for next_side in _SIDES[device.type]:
        if side and seconds * (next_side / side) ** 3 * (_LEAST_ROUNDS + 1) > budget_s:
            break
        side = next_side
        left, right = (torch.rand(side, side, device=device, dtype=dtype) for _ in range(2))
        multiply = partial(torch.mm, left, right, out=torch.empty_like(left))
        seconds = min(seconds_of(multiply, device) for _ in range(2))
    rounds = time_rounds(multiply, device, budget_s / 2)
    threads = ", one thread" if device.type == "cpu" else ""
    how = f"product of two {side} x {side} matrices{threads}; {rounds.told}"
    return Figure(2e-9 * side**3 / rounds.median, how)


def measure_copy(device: torch.device, budget_s: float) -> Figure:
    """GB/s of memory, read and written, of a copy that no cache holds."""
    num_bytes = _COPY_BYTES[device.type]
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    rounds = time_rounds(lambda: target.copy_(source), device, budget_s)
    how = f"copy of {num_bytes >> 20} MiB, bytes read and written; {rounds.told}"
    return Figure(2e-9 * num_bytes / rounds.median, how)


def measure_start(device: torch.device, budget_s: float) -> Figure:
    """Microseconds of an operation that has next to nothing to compute."""
    if device.type != "cuda":
        return _measure_layers(budget_s)
    tiny = torch.zeros(1, device=device)

    def work() -> None:
        for _ in range(_LAUNCHES):
            tiny.add_(1.0)

    rounds = time_rounds(work, device, budget_s)
    how = f"{_LAUNCHES} kernel launches one after another; {rounds.told}"
    return Figure(1e6 * rounds.median / _LAUNCHES, how)


def _measure_layers(budget_s: float) -> Figure:
    """Of a CPU, tiny layers forward and backward: a small convolution costs far more than an addition."""
    layers = nn.Sequential(
        nn.Conv2d(4, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16, 4),
    )
    images = torch.zeros(8, 4, 4, 4, requires_grad=True)
    wanted = [images, *layers.parameters()]

    def work() -> None:
        torch.autograd.grad(layers(images).sum(), wanted)

    rounds = time_rounds(work, torch.device("cpu"), budget_s)
    how = f"{len(layers)} tiny layers forward and backward, three operations each; {rounds.told}"
    return Figure(1e6 * rounds.median / len(layers) / 3, how)


def find_memory(device: torch.device, workers: int) -> Figure:
    """GB that a worker has: a GPU's, or its part of what this process may use of the machine's."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        return Figure(total / 1e9, "memory of the GPU")
    limits = [_machine_bytes()]
    for file in ("memory.max", "memory/memory.limit_in_bytes"):  # of a container
        path = Path("/sys/fs/cgroup", file)
        text = path.read_text().strip() if path.is_file() else ""
        limits += [int(text)] if text.isdecimal() else []
    return Figure(min(limits) / 1e9 / workers, f"memory of the machine, divided by {workers} workers")


def _machine_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal"))


def name_device(device: torch.device) -> str:
    """The name that its maker gave it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    pairs = dict(line.split(":", 1) for line in lines if ":" in line)
    known = {key.strip(): value.strip() for key, value in pairs.items()}
    if "model name" in known:
        return known["model name"]
    arm = f"{known.get('CPU implementer', '')} {known.get('CPU part', '')}".strip()
    return _ARM_CORES.get(arm, f"CPU {arm}".strip())


_ARM_CORES = {
    "0x41 0xd0c": "Neoverse-N1",
    "0x41 0xd40": "Neoverse-V1",
    "0x41 0xd49": "Neoverse-N2",
    "0x41 0xd4f": "Neoverse-V2",
}
