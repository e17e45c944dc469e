"""Measures the ladder: every rung at every size, beside the library that torch calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lockstep.errors import LockstepError
from lockstep.lab.device_limit import limit_gflop_s
from lockstep.lab.gemm.c_ladder import C_RUNGS, multiply_on_cpu
from lockstep.lab.gemm.cuda_ladder import CUDA_RUNGS, CannotRun, multiply_on_gpu
from lockstep.lab.timing import time_call
from lockstep.measure.probe_device import TimedRounds

Shape = tuple[int, int, int]  # rows of A, columns of B, and what is summed over
Multiply = Callable[[Tensor, Tensor], Tensor]
_PATIENCE_S = 20.0  # a rung that would take longer is left out
_TELLING = {"cpu": 1e7, "cuda": 1e9}  # operations from which on a product says how fast others will be
_CORNER = 256  # rows and columns of a product that says so before the first large one


@dataclass(frozen=True)
class GemmWay:
    """One way to multiply: a rung, or a library."""

    name: str
    multiply: Multiply
    precision: torch.dtype = torch.float32
    threads: int = 1
    is_library: bool = False


@dataclass(frozen=True)
class GemmTime:
    """One way at one size."""

    way: GemmWay
    shape: Shape
    time: TimedRounds
    limit_gflop_s: float | None

    @property
    def gflop_s(self) -> float:
        rows, columns, depth = self.shape
        return 2e-9 * rows * columns * depth / self.time.median

    @property
    def precision(self) -> str:
        return {torch.float32: "fp32", torch.bfloat16: "bf16"}[self.way.precision]


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
    """All rungs at every shape, those of a precision together, then the library.

    What cannot run says why, and the others go on.
    """
    slow = dict[str, float]()
    for shape in shapes:
        rows, columns, depth = shape
        work = 2.0 * rows * columns * depth
        maker = torch.Generator(device=device).manual_seed(0)
        matrices = [
            torch.randn(size, device=device, generator=maker) for size in ((rows, depth), (depth, columns))
        ]
        for way in ways_to_multiply(device, threads):
            if slow.get(way.name) == float("inf"):
                continue
            if slow.get(way.name, 0.0) * work > _PATIENCE_S:
                yield SkippedRung(way.name, shape, f"would take about {slow[way.name] * work:.0f} s")
                continue
            try:
                a, b = (each.to(way.precision) for each in matrices)
                if device.type == "cpu" and way.name not in slow:
                    expected_s = _time_corner(way, a, b) * work
                    if expected_s > _PATIENCE_S:
                        raise CannotRun(f"would take about {expected_s:.0f} s")
                found = time_call(partial(way.multiply, a, b), device, budget_s)
            except CannotRun as error:
                yield SkippedRung(way.name, shape, str(error))
                continue
            except torch.OutOfMemoryError:
                yield SkippedRung(way.name, shape, "does not fit the memory of the GPU")
                continue
            except LockstepError as error:
                yield SkippedRung(way.name, None, str(error).splitlines()[0])
                slow[way.name] = float("inf")
                continue
            if work > _TELLING[device.type]:
                slow[way.name] = found.median / work
            yield GemmTime(way, shape, found, limit_gflop_s(device, way.precision, way.threads))


def _time_corner(way: GemmWay, a: Tensor, b: Tensor) -> float:
    """Seconds that an operation takes in a small part of the product; the first call compiles."""
    a, b = (each[:_CORNER, :_CORNER].contiguous() for each in (a, b))
    way.multiply(a, b)
    start = time.perf_counter()
    way.multiply(a, b)
    return (time.perf_counter() - start) / (2.0 * len(a) * a.shape[1] * b.shape[1])


def ways_to_multiply(device: torch.device, threads: int) -> list[GemmWay]:
    """From the slowest to the library, one precision after another."""
    library = library_name(device)
    if device.type == "cuda":
        rungs = [GemmWay(rung.name, partial(multiply_on_gpu, rung), rung.precision) for rung in CUDA_RUNGS]
        return [
            *(way for way in rungs if way.precision == torch.float32),
            GemmWay(library, torch.mm, is_library=True),
            *(way for way in rungs if way.precision == torch.bfloat16),
            GemmWay("Triton", _by_triton, torch.bfloat16),
            GemmWay(f"{library}, bf16", torch.mm, torch.bfloat16, is_library=True),
        ]
    return [
        *(
            GemmWay(
                f"{rung.name}, {threads}" if rung.is_threaded else rung.name,
                partial(multiply_on_cpu, rung, threads=threads if rung.is_threaded else 1),
                threads=threads if rung.is_threaded else 1,
            )
            for rung in C_RUNGS
        ),
        GemmWay(library, torch.mm, is_library=True),
        GemmWay(f"{library}, {threads}", partial(_by_threads, threads), threads=threads, is_library=True),
    ]


def _by_triton(a: Tensor, b: Tensor) -> Tensor:
    try:
        from lockstep.lab.gemm.triton_gemm import multiply_by_triton
    except ImportError:
        raise LockstepError("the package triton is not installed") from None
    return multiply_by_triton(a, b)


def _by_threads(threads: int, a: Tensor, b: Tensor) -> Tensor:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return torch.mm(a, b)
    finally:
        torch.set_num_threads(before)
