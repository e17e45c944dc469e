"""Work and depth of a convolution by formula, and the operations that a program really asks for.

The formulas are those of Ben-Nun and Hoefler, "Demystifying Parallel and Distributed Deep Learning". They
count a multiplication with its addition once; depth is the longest chain when all else runs at once. They are
written for the forward pass. For the gradients the same terms stand with what these sum over: filters instead
of channels for the images', images and places for the weight's. The work of Winograd is derived here, term by
term, for all tiles and channels. Transforms by FFT are taken to cost 2.5 n log2 n each, as real ones do.
"""

from __future__ import annotations

from math import ceil, log2, prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.lab.conv.conv_algorithm import ConvAlgorithm
from lockstep.lab.conv.conv_shape import ConvPass, ConvShape
from lockstep.lab.conv.direct import direct
from lockstep.lab.conv.fft_conv import fft_conv, fft_size, transformed_planes
from lockstep.lab.conv.implicit_gemm import count_data_taps
from lockstep.lab.conv.winograd import WinogradTile


def work_of(algorithm: ConvAlgorithm, shape: ConvShape) -> float:
    """By formula; alike for the three passes."""
    if algorithm.on_cpu is fft_conv:
        size = prod(fft_size(shape))
        products = size * shape.batch * shape.out_channels * shape.weight_size[1]
        return 2.5 * size * log2(max(size, 2)) * transformed_planes(shape) + products
    if algorithm.tile:
        return _winograd_work(algorithm.tile, shape)
    return shape.operations / 2


def depth_of(algorithm: ConvAlgorithm, shape: ConvShape, which: ConvPass) -> int:
    """By formula: additions form trees, transforms follow each other."""
    summed = {
        ConvPass.FORWARD: shape.weight_size[1],
        ConvPass.DATA: shape.out_channels // shape.groups,
        ConvPass.WEIGHT: shape.batch,
    }[which]
    if algorithm.on_cpu is fft_conv:
        return 2 * _levels(prod(fft_size(shape))) + _levels(summed)
    if algorithm.tile:
        places = prod(map(algorithm.tile.count, shape.result_size[2:])) if which is ConvPass.WEIGHT else 1
        side = algorithm.tile.side
        return 2 * _levels(shape.kernel) + 4 * _levels(side) + _levels(summed) + _levels(places)
    window = shape.result_size[2:] if which is ConvPass.WEIGHT else (shape.kernel, shape.kernel)
    return _levels(summed) + sum(map(_levels, window))


def _levels(count: int) -> int:
    return ceil(log2(count)) if count > 1 else 0


def _winograd_work(tile: WinogradTile, shape: ConvShape) -> float:
    side, results, kernel = tile.side, tile.results, shape.kernel
    tiles = shape.batch * prod(map(tile.count, shape.result_size[2:]))
    pairs = shape.out_channels * shape.weight_size[1]
    filters = pairs * side * (kernel**2 + side * kernel)
    images = tiles * shape.in_channels * 2 * side**3
    sums = tiles * shape.out_channels * side * (side * results + results**2)
    return filters + images + sums + side**2 * tiles * pairs


def count_operations(algorithm: ConvAlgorithm, shape: ConvShape, which: ConvPass) -> int:
    """Multiplications and additions of the program for a CPU.

    Torch programs run with tensors that have shapes but no values, and every call is counted; loops in C are
    counted from their bounds.
    """
    algorithm.check_shape(shape)
    if algorithm.is_c:
        if which is not ConvPass.DATA or algorithm.on_cpu is direct:
            return shape.operations
        pairs = shape.batch * shape.in_channels * shape.out_channels // shape.groups
        return 2 * pairs * count_data_taps(shape)
    sizes = {
        ConvPass.FORWARD: (shape.image_size, shape.weight_size),
        ConvPass.DATA: (shape.result_size, shape.weight_size),
        ConvPass.WEIGHT: (shape.image_size, shape.result_size),
    }[which]
    first, second = (torch.empty(size, device="meta") for size in sizes)
    with _Counter() as counter:
        algorithm.on_cpu(shape, which, first, second)
    return int(counter.operations)


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up what every call of torch multiplies and adds."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("mm", "bmm"):
            each = 8 if found.is_complex() else 2  # a complex product is four products and as many additions
            self.operations += each * found.numel() * args[0].shape[-1]
        elif name == "add":
            self.operations += found.numel() * (1 if (kwargs or {}).get("alpha", 1) in (1, -1) else 2)
        elif name in ("sum", "col2im"):
            self.operations += args[0].numel()
        elif name.startswith("_fft"):
            self.operations += _transform_operations(name, args, found)
        return found


def _transform_operations(name: str, args: Any, found: Tensor) -> float:
    whole = args[0] if name == "_fft_r2c" else found
    length = prod(whole.shape[axis] for axis in args[1])
    return (5.0 if name == "_fft_c2c" else 2.5) * whole.numel() * log2(max(length, 1))
