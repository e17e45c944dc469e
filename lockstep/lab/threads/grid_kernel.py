"""The kernels of this folder, compiled for a layer's shape and started with T threads in all."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from lockstep.native.cuda_kernel import CudaKernel, Size3
from lockstep.native.nvrtc import compile_cuda

Start = Callable[[Size3, Size3, Sequence[Tensor | bytes]], None]  # grid, block, arguments
Load = Callable[[torch.device, str, str, Mapping[str, int]], Start]  # device, source, kernel's name, macros
BLOCK = 256  # threads at most
KERNELS = {
    "convolution_forward": "convolution_forward.cu",
    "convolution_data_gradient": "convolution_data_gradient.cu",
    "convolution_weight_gradient": "convolution_weight_gradient.cu",
    "add_parts": "sums.cu",
    "pooling_forward": "pooling.cu",
    "pooling_gradient": "pooling.cu",
    "linear_parts": "linear.cu",
    "linear_sum": "linear.cu",
    "relu_gradient": "linear.cu",
    "linear_data_gradient": "linear.cu",
    "linear_weight_gradient": "linear.cu",
    "linear_bias_gradient": "linear.cu",
    "softmax_cross_entropy": "loss.cu",
    "update": "update.cu",
}
_FOLDER = Path(__file__).with_name("cuda")


class GridKernel:
    """A kernel that is started with the same number of threads whatever the size of its work."""

    def __init__(
        self, load: Load, device: torch.device, threads: int, name: str, macros: Mapping[str, int]
    ) -> None:
        block = min(threads, BLOCK)
        self._grid, self._block = (threads // block, 1, 1), (block, 1, 1)
        self._start = load(device, kernel_source(name), name, macros)

    def __call__(self, *arguments: Tensor | int | float) -> None:
        """Start it; nothing waits."""
        self._start(self._grid, self._block, [_packed(each) for each in arguments])


def kernel_source(name: str) -> str:
    """A kernel's file, with what all share before it."""
    return (_FOLDER / "common.cuh").read_text() + (_FOLDER / KERNELS[name]).read_text()


def load_on_gpu(device: torch.device, source: str, name: str, macros: Mapping[str, int]) -> Start:
    """Compile by NVRTC, once for every number of threads: they all run the same instructions."""
    major, minor = torch.cuda.get_device_capability(device)
    return _loaded(device, _compiled(source, f"sm_{major}{minor}", tuple(macros.items())), name)


@cache
def _compiled(source: str, arch: str, macros: tuple[tuple[str, int], ...]) -> bytes:
    return compile_cuda(source, arch, dict(macros))


@cache
def _loaded(device: torch.device, cubin: bytes, name: str) -> CudaKernel:
    return CudaKernel(device, cubin, name)


def _packed(argument: Tensor | int | float) -> Tensor | bytes:
    if isinstance(argument, Tensor):
        return argument
    return struct.pack("i" if isinstance(argument, int) else "f", argument)
