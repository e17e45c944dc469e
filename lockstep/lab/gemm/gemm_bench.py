"""Measures the ladder: every rung at every size, beside the library that torch calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lockstep.errors import LockstepError
from lockstep.lab.gemm.c_ladder import C_RUNGS, multiply_on_cpu
from lockstep.lab.gemm.cuda_ladder import CUDA_RUNGS, multiply_on_gpu
from lockstep.lab.timing import time_call
from lockstep.measure.probe_device import TimedRounds

Shape = tuple[int, int, int]  # rows of A, columns of B, and what is summed over
Multiply = Callable[[Tensor, Tensor], Tensor]
_PATIENCE_S = 20.0  # a rung that would take longer is left out


@dataclass(frozen=True)
class GemmTime:
    """One rung at one size."""

    rung: str
    shape: Shape
    time: TimedRounds

    @property
    def gflop_s(self) -> float:
        rows, columns, depth = self.shape
        return 2e-9 * rows * columns * depth / self.time.median


@dataclass(frozen=True)
class SkippedRung:
    """A rung that was not measured, and why."""

    rung: str
    shape: Shape | None
    why: str


def library_name(device: torch.device) -> str:
    """What torch multiplies with."""
    if device.type == "cuda":
        return "cuBLAS"
    config = torch.__config__.show()
    return (
        "MKL" if "BLAS_INFO=mkl" in config else "OpenBLAS" if "BLAS_INFO=open" in config else "BLAS of torch"
    )


def measure_gemm(
    device: torch.device, shapes: Sequence[Shape], threads: int, budget_s: float
) -> Iterator[GemmTime | SkippedRung]:
    """All rungs at every shape, then the library, on a CPU by one thread and by several.

    What cannot run says why, and the others go on.
    """
    ways, slow = _ways(device, threads), dict[str, float]()
    for shape in shapes:
        rows, columns, depth = shape
        work = 2.0 * rows * columns * depth
        maker = torch.Generator(device=device).manual_seed(0)
        a, b = (
            torch.randn(size, device=device, generator=maker) for size in ((rows, depth), (depth, columns))
        )
        for name, multiply in ways.items():
            if slow.get(name) == float("inf"):
                continue
            if slow.get(name, 0.0) * work > _PATIENCE_S:
                yield SkippedRung(name, shape, f"would take about {slow[name] * work:.0f} s")
                continue
            try:
                found = time_call(partial(multiply, a, b), device, budget_s)
            except LockstepError as error:
                yield SkippedRung(name, None, str(error).splitlines()[0])
                slow[name] = float("inf")
                continue
            slow[name] = found.median / work
            yield GemmTime(name, shape, found)


def _ways(device: torch.device, threads: int) -> dict[str, Multiply]:
    library = library_name(device)
    if device.type == "cuda":
        return {**{rung.name: partial(multiply_on_gpu, rung) for rung in CUDA_RUNGS}, library: torch.mm}
    found: dict[str, Multiply] = {
        f"{rung.name}, {threads}" if rung.is_threaded else rung.name: partial(
            multiply_on_cpu, rung, threads=threads if rung.is_threaded else 1
        )
        for rung in C_RUNGS
    }
    return found | {library: torch.mm, f"{library}, {threads} threads": partial(_by_threads, threads)}


def _by_threads(threads: int, a: Tensor, b: Tensor) -> Tensor:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return torch.mm(a, b)
    finally:
        torch.set_num_threads(before)
