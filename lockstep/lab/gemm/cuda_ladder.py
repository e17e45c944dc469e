"""The rungs in CUDA C++: which file, and how many threads share how large a tile of the result."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from lockstep.errors import LockstepError
from lockstep.native.cuda_kernel import CudaKernel
from lockstep.native.nvrtc import compile_cuda
from lockstep.native.tensor_map import describe_matrix

_FOLDER = Path(__file__).with_name("cuda")
_BOX = 64  # rows and columns that the copy engine moves at once


class CannotRun(LockstepError):
    """A rung that this GPU or this shape does not admit."""


@dataclass(frozen=True)
class CudaRung:
    """One way to multiply two matrices on a GPU."""

    name: str
    file: str
    tile: tuple[int, int]  # rows and columns of the result that a block computes
    block: tuple[int, int]  # threads along x and y
    precision: torch.dtype = torch.float32
    shared: tuple[str, ...] = ("tile.cuh",)  # files before it
    shared_bytes: int = 0  # of shared memory, beyond what the file declares
    by_copy_engine: int = 0  # how many of A, B and the result; needs a Hopper GPU
    is_persistent: bool = False

    @property
    def arch(self) -> str:
        """The oldest GPU that can run it; with an "a" none but this."""
        return "sm_90a" if self.by_copy_engine else "sm_80"


_HOPPER = ("bf16.cuh", "hopper.cuh")
_STAGE_BYTES = 2 * (128 + 256) * 64  # a tile of A and one of B
CUDA_RUNGS = (
    CudaRung("one thread an element", "1_one_thread_an_element.cu", (16, 16), (16, 16)),
    CudaRung("coalesced", "2_coalesced.cu", (32, 32), (32, 32)),
    CudaRung("shared memory, 1-D", "3_shared_1d.cu", (32, 32), (32, 32)),
    CudaRung("shared memory, 2-D", "4_shared_2d.cu", (32, 32), (32, 32)),
    CudaRung("registers, 1-D", "5_registers_1d.cu", (64, 64), (512, 1)),
    CudaRung("registers, 2-D", "6_registers_2d.cu", (128, 128), (256, 1)),
    CudaRung("vectorized", "7_vectorized.cu", (128, 128), (256, 1)),
    CudaRung("double-buffered", "8_double_buffered.cu", (128, 128), (256, 1)),
    CudaRung("warp tiles", "9_warp_tiles.cu", (128, 256), (256, 1)),
    CudaRung(
        "tensor cores",
        "10_tensor_cores.cu",
        (128, 256),
        (256, 1),
        torch.bfloat16,
        ("bf16.cuh",),
        4 * 2 * (128 * 40 + 32 * 264),
    ),
    CudaRung(
        "warpgroups", "11_warpgroups.cu", (128, 256), (256, 1), torch.bfloat16, _HOPPER, 4 * _STAGE_BYTES, 2
    ),
    CudaRung(
        "specialized warps",
        "12_specialized.cu",
        (128, 256),
        (384, 1),
        torch.bfloat16,
        _HOPPER,
        4 * _STAGE_BYTES,
        2,
    ),
    CudaRung(
        "persistent grid",
        "13_persistent.cu",
        (128, 256),
        (384, 1),
        torch.bfloat16,
        _HOPPER,
        4 * _STAGE_BYTES + 2 * 128 * 128,
        3,
        is_persistent=True,
    ),
)


def multiply_on_gpu(rung: CudaRung, a: Tensor, b: Tensor) -> Tensor:
    """The product of two row-major matrices of the rung's precision."""
    rows, depth, columns = *a.shape, b.shape[1]
    result = torch.empty(rows, columns, device=a.device, dtype=a.dtype)
    kernel = _kernel(rung, a.device, rows, columns, depth)
    grid = -(-columns // rung.tile[1]), -(-rows // rung.tile[0]), 1
    if rung.is_persistent:
        grid = torch.cuda.get_device_properties(a.device).multi_processor_count // 2 * 2, 1, 1
    arguments = [
        describe_matrix(each, (_BOX, _BOX)) if place < rung.by_copy_engine else each
        for place, each in enumerate((a, b, result))
    ]
    kernel(grid, (*rung.block, 1), arguments)
    return result


def best_fp32_rung() -> CudaRung:
    """The last one that needs no tensor cores."""
    return next(rung for rung in reversed(CUDA_RUNGS) if rung.precision == torch.float32)


def source_of(rung: CudaRung) -> str:
    """The rung's file, with what it shares with others before it."""
    return "".join((_FOLDER / name).read_text(encoding="utf-8") for name in (*rung.shared, rung.file))


@cache
def _kernel(rung: CudaRung, device: torch.device, rows: int, columns: int, depth: int) -> CudaKernel:
    major, minor = torch.cuda.get_device_capability(device)
    if rung.by_copy_engine and major != 9:
        raise CannotRun(f"needs a GPU of compute capability 9.0; this one has {major}.{minor}")
    if rung.precision == torch.bfloat16 and major < 8:
        raise CannotRun(f"needs a GPU of compute capability 8.0 or more; this one has {major}.{minor}")
    if rung.by_copy_engine and (columns % 8 or depth % 8):
        raise CannotRun("the copy engine wants rows of a multiple of 16 bytes: 8 values of bf16")
    arch = rung.arch if rung.by_copy_engine else f"sm_{major}{minor}"
    cubin = compile_cuda(source_of(rung), arch, {"M": rows, "N": columns, "K": depth})
    return CudaKernel(device, cubin, "gemm", rung.shared_bytes)
