"""Implicit GEMM: im2col whose columns are never stored.

They are read from the image when the product packs its panels (c/implicit_gemm.c). Two tables say where: the
element (k, j) of the matrix of columns is at place row[k] + column[j] of a padded image. The gradient of the
weight swaps the tables. The gradient of the images reads results instead of images; with a stride S it falls
into S² smaller products, one for each place of a pixel modulo S, of which each meets its own filter values.
"""

from __future__ import annotations

import ctypes
from functools import cache
from itertools import product
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from lockstep.lab.conv.conv_input import need_fp32, pad_images, split_groups
from lockstep.lab.conv.conv_shape import ConvPass, ConvShape
from lockstep.native.c_library import compile_c

_SOURCES = (
    Path(__file__).parents[1] / "gemm" / "c" / "panel.h",
    Path(__file__).with_name("c") / "implicit_gemm.c",
)


def implicit_gemm(shape: ConvShape, which: ConvPass, first: Tensor, second: Tensor) -> Tensor:
    """Any of the three passes on a CPU, in fp32."""
    need_fp32("implicit GEMM", first)
    if which is ConvPass.DATA:
        return _data_gradient(shape, first, second)
    images = split_groups(pad_images(shape, first), 1, shape.groups)
    forward = which is ConvPass.FORWARD
    filters, pixels = _filter_places(shape), _pixel_places(shape)
    found = torch.zeros(shape.result_size if forward else shape.weight_size)
    outputs = split_groups(found, 1 if forward else 0, shape.groups)
    given = split_groups(second.contiguous(), 0 if forward else 1, shape.groups)
    for group in range(shape.groups):
        if forward:
            _multiply(given[group], images[:, group], (filters, pixels), outputs[:, group], (0, 1))
        else:
            _multiply(given[:, group], images[:, group], (pixels, filters), outputs[group], (1, 0))
    return found


def count_data_taps(shape: ConvShape) -> int:
    """How often a filter value meets a pixel in the gradient of an image, for a channel and a filter."""
    both = (
        sum(len(_taps(shape, start)) * len(range(start, size, shape.stride)) for start in range(shape.stride))
        for size in (shape.height, shape.width)
    )
    rows, columns = both
    return rows * columns


def _data_gradient(shape: ConvShape, gradient: Tensor, weight: Tensor) -> Tensor:
    edge = shape.dilation * (shape.kernel - 1)  # so much of zeros that no place lies outside
    right, below = (
        max(0, (size - 1 + shape.padding) // shape.stride - count + 1)
        for size, count in ((shape.width, shape.result_size[3]), (shape.height, shape.result_size[2]))
    )
    padded = functional.pad(gradient, (edge, right, edge, below)).contiguous()
    padded, weight = split_groups(padded, 1, shape.groups), split_groups(weight, 0, shape.groups)
    found = torch.zeros(shape.image_size)
    outputs = split_groups(found, 1, shape.groups)
    for top, left in product(range(min(shape.stride, shape.height)), range(min(shape.stride, shape.width))):
        down, across = _taps(shape, top), _taps(shape, left)
        if not down or not across:
            continue
        part = outputs[:, :, :, top :: shape.stride, left :: shape.stride]
        columns = _grid(padded.shape[4], range(part.shape[3]), range(part.shape[4]), 1)
        rows = _grid(
            padded.shape[4],
            [edge + (top + shape.padding - r * shape.dilation) // shape.stride for r in down],
            [edge + (left + shape.padding - s * shape.dilation) // shape.stride for s in across],
            1,
        )
        plane = padded.shape[3] * padded.shape[4]
        rows = (torch.arange(padded.shape[2])[:, None] * plane + rows).flatten()
        used = weight[:, :, :, down][..., across]  # [G, K, C, taps, taps]
        for group in range(shape.groups):
            sums = torch.zeros(shape.batch, *part.shape[2:])
            matrix = used[group].transpose(0, 1).contiguous()
            _multiply(matrix, padded[:, group], (rows, columns), sums, (0, 1))
            part[:, group] = sums
    return found


def _taps(shape: ConvShape, start: int) -> list[int]:
    """The rows of a filter that pixels at `start` modulo the stride meet."""
    return [
        r for r in range(shape.kernel) if (start + shape.padding - r * shape.dilation) % shape.stride == 0
    ]


def _filter_places(shape: ConvShape) -> Tensor:
    """Where in a padded image the values lie that a filter meets, from the first of them."""
    height, width = (size + 2 * shape.padding for size in (shape.height, shape.width))
    window = _grid(width, range(shape.kernel), range(shape.kernel), shape.dilation)
    return (torch.arange(shape.weight_size[1])[:, None] * height * width + window).flatten()


def _pixel_places(shape: ConvShape) -> Tensor:
    """Where in a padded image the first of these values lies, for every result."""
    rows, columns = shape.result_size[2:]
    return _grid(shape.width + 2 * shape.padding, range(rows), range(columns), shape.stride)


def _grid(width: int, rows: range | list[int], columns: range | list[int], step: int) -> Tensor:
    return (torch.tensor(rows)[:, None] * width * step + torch.tensor(columns) * step).flatten()


def _multiply(
    matrix: Tensor, images: Tensor, places: tuple[Tensor, Tensor], found: Tensor, steps: tuple[int, int]
) -> None:
    """Add the matrix times the gathered columns to `found`, for every image.

    `steps` says of the matrix and of what is found whether every image has its own.
    """
    rows, columns = (each.int() for each in places)
    of_matrix, of_found = steps
    sizes = (
        *(matrix.shape[of_matrix], len(columns), len(rows), len(images)),
        *(of_matrix * matrix.stride(0), images.stride(0), of_found * found.stride(0)),
    )
    pointers = (ctypes.c_void_p(each.data_ptr()) for each in (matrix, images, rows, columns, found))
    compile_c(_source()).gathered_gemm(*pointers, (ctypes.c_long * len(sizes))(*sizes))


@cache
def _source() -> str:
    return "".join(path.read_text(encoding="utf-8") for path in _SOURCES)
