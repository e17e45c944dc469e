"""Compiles the CUDA C++ of an algorithm for one convolution, and starts its kernels."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from lockstep.errors import LockstepError
from lockstep.lab.conv.conv_shape import ConvPass, ConvShape
from lockstep.native.cuda_kernel import CudaKernel, Size3
from lockstep.native.nvrtc import compile_cuda

CONV_THREADS = 256  # of a block; THREADS in conv.cuh
_FOLDER = Path(__file__).with_name("cuda")
_MOST_ELEMENTS = 2**31 - 1
_NEEDS = {
    "implicit_gemm.cu": ("gemm_tile.cuh",),
    "implicit_gemm_weight.cu": ("gemm_tile.cuh",),
    "winograd.cu": ("winograd_2.cuh", "winograd_4.cuh"),
}


class ConvSource:
    """A file of kernels, compiled for one convolution when the first of them starts."""

    def __init__(self, file: str, shape: ConvShape, values: Tensor, **more: int) -> None:
        self._file, self._device = file, values.device
        self._defines = tuple((macros_of(shape, values.dtype) | more).items())

    def start(self, name: str, grid: Size3, *arguments: Tensor) -> None:
        """Start a kernel; nothing waits."""
        kernel = _kernel(self._file, name, self._device, self._defines)
        kernel(grid, (CONV_THREADS, 1, 1), arguments)


def macros_of(shape: ConvShape, dtype: torch.dtype) -> dict[str, int]:
    """What the compiler knows of a convolution."""
    names = {"N": shape.batch, "C": shape.in_channels, "K": shape.out_channels, "R": shape.kernel}
    names |= {"H": shape.height, "W": shape.width, "P": shape.result_size[2], "Q": shape.result_size[3]}
    names |= {"STRIDE": shape.stride, "PADDING": shape.padding, "DILATION": shape.dilation}
    return names | {"GROUPS": shape.groups, "BF16": int(dtype == torch.bfloat16)}


def conv_cuda_source(file: str) -> str:
    """A file with what it shares with others before it."""
    return "".join((_FOLDER / name).read_text("utf-8") for name in ("conv.cuh", *_NEEDS.get(file, ()), file))


def take_operands(
    algorithm: str, shape: ConvShape, which: ConvPass, first: Tensor, second: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Both operands, contiguous, and an empty result; or why they cannot be convolved."""
    images, weight, results = shape.image_size, shape.weight_size, shape.result_size
    sizes = {
        ConvPass.FORWARD: (images, weight, results),
        ConvPass.DATA: (results, weight, images),
        ConvPass.WEIGHT: (images, results, weight),
    }[which]
    if min(results) < 1:
        raise LockstepError(f"{algorithm}: a result of {results[2]} × {results[3]} has no elements")
    if first.dtype != second.dtype or first.dtype not in (torch.float32, torch.bfloat16):
        raise LockstepError(
            f"{algorithm}: {first.dtype} by {second.dtype}: it takes two of fp32 or two of bf16"
        )
    for given, wanted in zip((first, second), sizes, strict=False):
        if tuple(given.shape) != wanted:
            raise LockstepError(f"{algorithm}: a tensor of {tuple(given.shape)}: the {which} takes {wanted}")
    largest = max(torch.Size(size).numel() for size in sizes)
    if largest > _MOST_ELEMENTS:
        raise LockstepError(f"{algorithm}: {largest} elements: its kernels count to {_MOST_ELEMENTS}")
    return (
        first.contiguous(),
        second.contiguous(),
        torch.empty(sizes[2], dtype=first.dtype, device=first.device),
    )


def multiply_batch(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Products of matrices by torch, one after another; sums are fp32, and stored as `dtype`."""
    if len(a) == 1:
        return (torch.mm(a[0], b[0]) if a.dtype == dtype else torch.mm(a[0], b[0], out_dtype=dtype))[None]
    return torch.bmm(a, b) if a.dtype == dtype else torch.bmm(a, b, out_dtype=dtype)


@cache
def _kernel(file: str, name: str, device: torch.device, defines: tuple[tuple[str, int], ...]) -> CudaKernel:
    if device.type != "cuda":
        raise LockstepError(f"{file}: tensors on {device}: its kernels run on a GPU")
    return CudaKernel(device, _cubin(file, device, defines), name)


@cache
def _cubin(file: str, device: torch.device, defines: tuple[tuple[str, int], ...]) -> bytes:
    major, minor = torch.cuda.get_device_capability(device)
    return compile_cuda(conv_cuda_source(file), f"sm_{major}{minor}", dict(defines))
