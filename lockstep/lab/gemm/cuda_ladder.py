"""The rungs in CUDA C++: which file, and how many threads share how large a tile of the result."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from lockstep.lab.native.cuda_kernel import CudaKernel
from lockstep.lab.native.nvrtc import compile_cuda

_FOLDER = Path(__file__).with_name("cuda")


@dataclass(frozen=True)
class CudaRung:
    """One way to multiply two matrices on a GPU."""

    name: str
    file: str
    tile: tuple[int, int]  # rows and columns of the result that a block computes
    block: tuple[int, int]  # threads along x and y


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
)


def multiply_on_gpu(rung: CudaRung, a: Tensor, b: Tensor) -> Tensor:
    """The product of two row-major matrices on a GPU."""
    rows, depth, columns = *a.shape, b.shape[1]
    result = torch.empty(rows, columns, device=a.device)
    grid = -(-columns // rung.tile[1]), -(-rows // rung.tile[0]), 1
    _kernel(rung, a.device, rows, columns, depth)(grid, (*rung.block, 1), (a, b, result))
    return result


def source_of(rung: CudaRung) -> str:
    """The rung's file, with what it shares with others before it."""
    return (_FOLDER / "tile.cuh").read_text() + (_FOLDER / rung.file).read_text()


@cache
def _kernel(rung: CudaRung, device: torch.device, rows: int, columns: int, depth: int) -> CudaKernel:
    major, minor = torch.cuda.get_device_capability(device)
    cubin = compile_cuda(source_of(rung), f"sm_{major}{minor}", {"M": rows, "N": columns, "K": depth})
    return CudaKernel(device, cubin, "gemm")
