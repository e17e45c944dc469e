"""The algorithms by name, what each admits, and which program runs it on which device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lockstep.lab.conv.conv_input import ConvRefused
from lockstep.lab.conv.conv_on_gpu import (
    direct_on_gpu,
    im2col_on_gpu,
    implicit_gemm_on_gpu,
    winograd_on_gpu,
)
from lockstep.lab.conv.conv_shape import ConvPass, ConvShape
from lockstep.lab.conv.direct import direct
from lockstep.lab.conv.fft_conv import fft_conv
from lockstep.lab.conv.im2col import im2col
from lockstep.lab.conv.implicit_gemm import implicit_gemm
from lockstep.lab.conv.winograd import F2, F4, WinogradTile, refused_by_winograd, winograd

Convolve = Callable[[ConvShape, ConvPass, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class ConvAlgorithm:
    """One way to convolve, forward and backward."""

    name: str
    admits: str
    on_cpu: Convolve
    on_gpu: Convolve
    tile: WinogradTile | None = None
    refused: Callable[[ConvShape], str] | None = None  # what of a shape it does not admit

    @property
    def is_c(self) -> bool:
        """Whether its program for a CPU is C."""
        return self.on_cpu in (direct, implicit_gemm)

    def check_shape(self, shape: ConvShape) -> None:
        """Raise ConvRefused for what it does not admit."""
        if self.refused and (what := self.refused(shape)):
            raise ConvRefused(f"{self.name}: {what}: it admits {self.admits}")


CONV_ALGORITHMS = (
    ConvAlgorithm("direct", "every convolution", direct, direct_on_gpu),
    ConvAlgorithm("im2col + GEMM", "every convolution", im2col, im2col_on_gpu),
    ConvAlgorithm("implicit GEMM", "every convolution", implicit_gemm, implicit_gemm_on_gpu),
    ConvAlgorithm("FFT", "every convolution; a stride costs what stride 1 does", fft_conv, fft_conv),
    *(
        ConvAlgorithm(
            f"Winograd F({tile.results}×{tile.results})",
            "3×3 filters with stride 1 and dilation 1, whose neighbouring results share products",
            partial(winograd, tile),
            partial(winograd_on_gpu, tile.results),
            tile,
            refused_by_winograd,
        )
        for tile in (F2, F4)
    ),
)


def run_conv(
    algorithm: ConvAlgorithm, shape: ConvShape, which: ConvPass, first: Tensor, second: Tensor
) -> Tensor:
    """One pass by one algorithm, on the device that its tensors are on."""
    algorithm.check_shape(shape)
    program = algorithm.on_gpu if first.is_cuda else algorithm.on_cpu
    try:
        return program(shape, which, first, second)
    except torch.OutOfMemoryError:
        raise ConvRefused(f"{algorithm.name}: does not fit the memory of the GPU") from None
