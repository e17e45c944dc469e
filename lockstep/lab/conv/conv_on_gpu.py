"""Convolutions by kernels in CUDA C++: direct, im2col, implicit GEMM and Winograd, with both gradients.

Each takes the operands of a pass as ConvPass says, in fp32 or bf16, and sums in fp32.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lockstep.errors import LockstepError
from lockstep.lab.conv.conv_shape import ConvPass, ConvShape
from lockstep.lab.conv.launch_on_gpu import CONV_THREADS, ConvSource, multiply_batch, take_operands

_KERNELS = {
    ConvPass.FORWARD: "forward",
    ConvPass.DATA: "data_gradient",
    ConvPass.WEIGHT: "weight_gradient",
}
_DEPTH = 8  # of a step of implicit GEMM
_ENOUGH_BLOCKS = 512  # keep a large GPU busy; the same on every GPU, so that sums are cut alike
_LEAST_STEPS = 4  # of a part of the weight gradient
_LEAST_TILES = 512


def direct_on_gpu(shape: ConvShape, which: ConvPass, first: Tensor, second: Tensor) -> Tensor:
    """One thread an element of the result."""
    first, second, result = take_operands("direct", shape, which, first, second)
    source = ConvSource("direct.cu", shape, first)
    source.start(_KERNELS[which], (_ceil(result.numel(), CONV_THREADS), 1, 1), first, second, result)
    return result


def im2col_on_gpu(shape: ConvShape, which: ConvPass, first: Tensor, second: Tensor) -> Tensor:
    """Patches as columns of a matrix, which torch multiplies."""
    first, second, result = take_operands("im2col", shape, which, first, second)
    source, groups, taps = ConvSource("im2col.cu", shape, first), shape.groups, shape.kernel**2
    batch, filters, height, width = shape.result_size
    positions, depth = batch * height * width, shape.weight_size[1] * taps
    if which is ConvPass.DATA:
        weight = second.view(groups, filters // groups, depth)
        columns = multiply_batch(weight.transpose(1, 2), _by_filter(shape, first), torch.float32)
        source.start("from_columns", (_ceil(result.numel(), CONV_THREADS), 1, 1), columns, result)
        return result
    columns = torch.empty(groups, depth, positions, dtype=first.dtype, device=first.device)
    source.start("to_columns", (_ceil(positions, CONV_THREADS), shape.in_channels, 1), first, columns)
    if which is ConvPass.WEIGHT:
        gradient = multiply_batch(_by_filter(shape, second), columns.transpose(1, 2), first.dtype)
        return gradient.view(shape.weight_size)
    found = multiply_batch(second.view(groups, filters // groups, depth), columns, first.dtype)
    return found.view(filters, batch, height, width).transpose(0, 1).contiguous()


def _by_filter(shape: ConvShape, results: Tensor) -> Tensor:
    """Results as (groups, filters of a group, positions of all images)."""
    return results.transpose(0, 1).reshape(shape.groups, shape.out_channels // shape.groups, -1)


def implicit_gemm_on_gpu(shape: ConvShape, which: ConvPass, first: Tensor, second: Tensor) -> Tensor:
    """The product of im2col, gathered on the way."""
    first, second, result = take_operands("implicit GEMM", shape, which, first, second)
    if which is ConvPass.WEIGHT:
        return _implicit_weight_gradient(shape, first, second, result)
    is_data = which is ConvPass.DATA
    channels, classes = first.shape[1] // shape.groups, shape.stride if is_data else 1
    depth = _DEPTH if channels % (2 * _DEPTH) else 2 * _DEPTH  # longer steps, fewer barriers
    weight = _in_reading_order(shape, second, is_data, depth)
    columns = shape.batch * _ceil(result.shape[2], classes) * _ceil(result.shape[3], classes)
    beside = shape.groups * classes**2
    rows, wide = _tile(result.shape[1] // shape.groups, columns, beside)
    grid = _ceil(result.shape[1] // shape.groups, rows) * _ceil(columns, wide), shape.groups, classes**2
    macros = {"ROWS": rows, "COLUMNS": wide, "DEPTH": depth, "IS_DATA": int(is_data)}
    source = ConvSource("implicit_gemm.cu", shape, first, **macros)
    source.start("implicit_gemm", grid, first, weight, result)
    return result


def _in_reading_order(shape: ConvShape, weight: Tensor, is_data: bool, depth: int) -> Tensor:
    """Weights as (groups, channels / run, taps, run, rows), where channels are those that are summed over."""
    filters, channels = shape.out_channels // shape.groups, shape.weight_size[1]
    found = weight.view(shape.groups, filters, channels, shape.kernel**2)
    found = found if is_data else found.transpose(1, 2)
    run = depth if found.shape[1] % depth == 0 else 1
    found = torch.unflatten(found, 1, (-1, run))
    return found.permute(0, 1, 4, 2, 3).contiguous()


def _implicit_weight_gradient(shape: ConvShape, images: Tensor, gradient: Tensor, result: Tensor) -> Tensor:
    filters, columns = shape.out_channels // shape.groups, shape.weight_size[1] * shape.kernel**2
    rows, wide = (64 if size <= 64 else 128 for size in (filters, columns))
    tiles = _ceil(filters, rows) * _ceil(columns, wide)
    steps = _ceil(gradient.numel() // shape.out_channels, _DEPTH)
    parts = _parts(tiles * shape.groups, steps // _LEAST_STEPS)
    macros = {"ROWS": rows, "COLUMNS": wide, "DEPTH": _DEPTH, "PARTS": parts}
    source = ConvSource("implicit_gemm_weight.cu", shape, images, **macros)
    sums = torch.empty(parts, *result.shape, device=images.device)
    source.start("part_of_weight_gradient", (tiles, shape.groups, parts), images, gradient, sums)
    source.start("add_parts", (_ceil(result.numel(), CONV_THREADS), 1, 1), sums, result)
    return result


def _tile(rows: int, columns: int, beside: int) -> tuple[int, int]:
    """Rows and columns of a block: large ones read less, small ones are more."""
    blocks = _ceil(rows, 128) * _ceil(columns, 128) * beside
    return (64, 64) if blocks < _ENOUGH_BLOCKS // 4 else (64 if rows <= 64 else 128, 128)


def _parts(blocks: int, most: int) -> int:
    """Into how many parts a sum is cut, so that there are blocks enough."""
    return max(1, min(_ENOUGH_BLOCKS // blocks, most))


def winograd_on_gpu(tile: int, shape: ConvShape, which: ConvPass, first: Tensor, second: Tensor) -> Tensor:
    """F(tile × tile, 3 × 3): transforms by kernels, the product for each place of a patch by torch."""
    algorithm = f"Winograd F({tile}×{tile}, 3×3)"
    for name, value, only in (
        ("kernel", shape.kernel, (3,)),
        ("stride", shape.stride, (1,)),
        ("dilation", shape.dilation, (1,)),
        ("tile", tile, (2, 4)),
    ):
        if value not in only:
            raise LockstepError(f"{algorithm}: {name} {value}: it is for {' and '.join(map(str, only))} only")
    first, second, result = take_operands(algorithm, shape, which, first, second)
    if which is ConvPass.WEIGHT:
        return _winograd_weight_gradient(tile, shape, first, second, result)
    is_data = which is ConvPass.DATA
    if is_data:  # a forward pass over the gradient of the result, by filters turned around
        _, channels, height, width = shape.result_size
        shape = replace(
            shape, in_channels=channels, out_channels=shape.in_channels, height=height, width=width
        )
        shape = replace(shape, padding=2 - shape.padding)
    tiles = _round_up(_tiles(tile, shape), 8)
    source = _winograd_source(tile, shape, first, PARTS=1, PART_TILES=tiles, IS_ROTATED=int(is_data))
    places, groups, across = (tile + 2) ** 2, shape.groups, _ceil(tiles, CONV_THREADS)
    patches = first.new_empty(places * groups, shape.in_channels // groups, tiles)
    source.start("transform_images", (across, shape.in_channels, 1), first, patches)
    filters = first.new_empty(places * groups, second.shape[0] // groups, second.shape[1])
    source.start("transform_filters", (_ceil(second.numel(), 9 * CONV_THREADS), 1, 1), second, filters)
    filters = filters.transpose(1, 2) if is_data else filters
    products = multiply_batch(filters, patches, torch.float32)
    source.start("transform_results_back", (across, shape.out_channels, 1), products, result)
    return result


def _winograd_weight_gradient(
    tile: int, shape: ConvShape, images: Tensor, gradient: Tensor, result: Tensor
) -> Tensor:
    places, groups, tiles = (tile + 2) ** 2, shape.groups, _tiles(tile, shape)
    channels, filters = shape.in_channels // groups, shape.out_channels // groups
    blocks = places * groups * _ceil(filters, 128) * _ceil(channels, 128)
    parts = _parts(blocks, tiles // _LEAST_TILES)
    part_tiles = _round_up(_ceil(tiles, parts), 8)
    source = _winograd_source(tile, shape, images, PARTS=parts, PART_TILES=part_tiles, IS_ROTATED=0)
    across = _ceil(part_tiles, CONV_THREADS)
    patches = images.new_empty(places * parts * groups, channels, part_tiles)
    source.start("transform_images", (across, shape.in_channels, parts), images, patches)
    gradients = images.new_empty(places * parts * groups, filters, part_tiles)
    source.start("transform_gradients", (across, shape.out_channels, parts), gradient, gradients)
    products = multiply_batch(gradients, patches.transpose(1, 2), torch.float32)
    source.start("transform_filters_back", (_ceil(result.numel(), 9 * CONV_THREADS), 1, 1), products, result)
    return result


def _winograd_source(tile: int, shape: ConvShape, values: Tensor, **more: int) -> ConvSource:
    return ConvSource("winograd.cu", shape, values, TILE=tile, **more)


def _tiles(tile: int, shape: ConvShape) -> int:
    return shape.batch * _ceil(shape.result_size[2], tile) * _ceil(shape.result_size[3], tile)


def _ceil(number: int, by: int) -> int:
    return -(-number // by)


def _round_up(number: int, by: int) -> int:
    return _ceil(number, by) * by
