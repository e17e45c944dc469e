"""Winograd: tiles of 3×3 convolutions with fewer multiplications, paid for with additions and accuracy.

m × m results of a tile need (m + 2)² products instead of 9 m²: 2.25 times fewer for m = 2, 4 times fewer for
m = 4. Filters and tiles are transformed first, by sums with small constants; the products of all tiles are
then (m + 2)² independent matrix products over channels, which run as one batched GEMM; sums give the results.
The larger the tile, the larger the constants and their rounding: F(4×4) in bf16 shows it.

The gradient of the images is a convolution with the flipped filters. The gradient of the weight runs the
forward's three steps backwards: its matrix products sum over tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from lockstep.lab.conv.conv_input import split_groups, work_precision
from lockstep.lab.conv.conv_shape import ConvPass, ConvShape

Matrix = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class WinogradTile:
    """The matrices of F(m×m, 3×3): result = A (G g Gᵀ · Bᵀ d B) Aᵀ, where · multiplies element by element."""

    results: int  # m
    image: Matrix  # Bᵀ
    filters: Matrix  # G
    sums: Matrix  # Aᵀ

    @property
    def side(self) -> int:
        return self.results + 2

    def count(self, size: int) -> int:
        """How many tiles cover so many results."""
        return -(-size // self.results)


F2 = WinogradTile(
    2,
    image=((1, 0, -1, 0), (0, 1, 1, 0), (0, -1, 1, 0), (0, -1, 0, 1)),
    filters=((1, 0, 0), (0.5, 0.5, 0.5), (0.5, -0.5, 0.5), (0, 0, 1)),
    sums=((1, 1, 1, 0), (0, 1, -1, 1)),
)
F4 = WinogradTile(
    4,
    image=(
        (4, 0, -5, 0, 1, 0),
        (0, -4, -4, 1, 1, 0),
        (0, 4, -4, -1, 1, 0),
        (0, -2, -1, 2, 1, 0),
        (0, 2, -1, -2, 1, 0),
        (0, 4, 0, -5, 0, 1),
    ),
    filters=(
        (1 / 4, 0, 0),
        (-1 / 6, -1 / 6, -1 / 6),
        (-1 / 6, 1 / 6, -1 / 6),
        (1 / 24, 1 / 12, 1 / 6),
        (1 / 24, -1 / 12, 1 / 6),
        (0, 0, 1),
    ),
    sums=((1, 1, 1, 1, 1, 0), (0, 1, -1, 2, -2, 0), (0, 1, 1, 4, 4, 0), (0, 1, -1, 8, -8, 1)),
)


def refused_by_winograd(shape: ConvShape) -> str:
    """The first size that the transforms are not made for, or nothing."""
    sizes = ("kernel", shape.kernel, 3), ("stride", shape.stride, 1), ("dilation", shape.dilation, 1)
    return next((f"{name} {value}" for name, value, only in sizes if value != only), "")


def winograd(tile: WinogradTile, shape: ConvShape, which: ConvPass, first: Tensor, second: Tensor) -> Tensor:
    """Any of the three passes; transforms are computed in fp32 or better, products in the tensors' type."""
    if which is ConvPass.WEIGHT:
        return _weight_gradient(tile, shape, first, second)
    if which is ConvPass.FORWARD:
        return _forward(tile, first, second, shape.padding, shape.groups)
    groups, inside = shape.groups, shape.weight_size[1]
    turned = split_groups(second.flip(2, 3), 0, groups).transpose(1, 2)
    turned = turned.reshape(groups * inside, shape.out_channels // groups, 3, 3)
    return _forward(tile, first, turned, 2 - shape.padding, groups)


def _forward(tile: WinogradTile, images: Tensor, weight: Tensor, padding: int, groups: int) -> Tensor:
    height, width = (size + 2 * padding - 2 for size in images.shape[2:])
    tiles = transform_images(tile, images, padding, (height, width))
    products = _by_group(tiles, groups) @ _transform_filters(tile, weight, groups)
    spread = products.transpose(1, 2).reshape(*tiles.shape[:-1], len(weight))
    found = _sum_tiles(tile, spread.to(work_precision(images)))
    return found[:, :, :height, :width].to(images.dtype).contiguous()


def _weight_gradient(tile: WinogradTile, shape: ConvShape, images: Tensor, gradient: Tensor) -> Tensor:
    height, width = gradient.shape[2:]
    tiles = transform_images(tile, images, shape.padding, (height, width))
    spread = _spread_results(tile, gradient)
    products = _by_group(spread, shape.groups).transpose(2, 3) @ _by_group(tiles, shape.groups)
    back = _both_axes(tile.filters, images).T  # [9, side²]
    found = back @ products.to(back.dtype).flatten(1)
    return found.T.reshape(shape.weight_size).to(images.dtype).contiguous()


def transform_images(tile: WinogradTile, images: Tensor, padding: int, results: tuple[int, int]) -> Tensor:
    """Bᵀ d B of all tiles: [side, side, N, rows of tiles, columns of tiles, C].

    Tiles overlap by two, so that a tile's later pixels are the next tile's first: the image is laid out once,
    by a pixel's place in its tile, and everything after is additions of long runs.
    """
    rows, columns = map(tile.count, results)
    laid = _lay_out(tile, images.to(work_precision(images)), padding, (rows + 1, columns + 1))
    step = tile.results
    along = _combine(
        tile.image, [laid[:, j % step, :, :, j // step :][:, :, :, :columns] for j in range(tile.side)]
    )
    found = _combine(tile.image, [along[:, i % step, :, i // step :][:, :, :rows] for i in range(tile.side)])
    return found.to(images.dtype)


def _lay_out(tile: WinogradTile, images: Tensor, padding: int, tiles: tuple[int, int]) -> Tensor:
    """[row in the tile, column in the tile, N, rows of tiles, columns of tiles, C]."""
    step = tile.results
    below, right = (
        count * step - size - padding for count, size in zip(tiles, images.shape[2:], strict=True)
    )
    padded = functional.pad(images, (padding, right, padding, below))
    split = torch.unflatten(torch.unflatten(padded, 3, (tiles[1], step)), 2, (tiles[0], step))
    return split.permute(3, 5, 0, 2, 4, 1).contiguous()


def _spread_results(tile: WinogradTile, gradient: Tensor) -> Tensor:
    """A y Aᵀ of all tiles of a gradient of the results, laid out as the transformed images are."""
    rows, columns = map(tile.count, gradient.shape[2:])
    laid = _lay_out(tile, gradient.to(work_precision(gradient)), 0, (rows, columns))
    spread = tuple(zip(*tile.sums, strict=True))
    along = _combine(spread, list(laid.unbind(1)))
    return _combine(spread, list(along.unbind(1))).to(gradient.dtype)


def _sum_tiles(tile: WinogradTile, products: Tensor) -> Tensor:
    """Aᵀ p A of all tiles, as images."""
    down = _combine(tile.sums, list(products))
    found = _combine(tile.sums, list(down.unbind(1)))  # [column, row, N, rows, columns, K]
    return found.permute(2, 5, 3, 1, 4, 0).flatten(4, 5).flatten(2, 3)


def _combine(matrix: Matrix, parts: Sequence[Tensor]) -> Tensor:
    """The matrix times the parts, by additions; every row of it has a 1 to start with."""
    found = parts[0].new_empty(len(matrix), *parts[0].shape)
    for row, to in zip(matrix, found, strict=True):
        terms = [(factor, part) for factor, part in zip(row, parts, strict=True) if factor]
        terms.sort(key=lambda term: term[0] != 1)
        (_, start), *rest = terms
        if not rest:
            to.copy_(start)
        for number, (factor, part) in enumerate(rest):
            torch.add(to if number else start, part, alpha=factor, out=to)
    return found


def _transform_filters(tile: WinogradTile, weight: Tensor, groups: int) -> Tensor:
    """G g Gᵀ of all filters: [side², G, C, K]."""
    both = _both_axes(tile.filters, weight)
    turned = split_groups(weight.to(both.dtype).flatten(2), 0, groups).permute(3, 0, 2, 1)
    return (both @ turned.flatten(1)).view(-1, *turned.shape[1:]).to(weight.dtype)


def _both_axes(matrix: Matrix, like: Tensor) -> Tensor:
    """What the matrix does along both axes of a tile, as one matrix."""
    one = torch.tensor(matrix, dtype=work_precision(like), device=like.device)
    return torch.kron(one, one)


def _by_group(tiles: Tensor, groups: int) -> Tensor:
    """[side², G, tiles, channels of a group]."""
    return split_groups(tiles.flatten(2, 4).flatten(0, 1), 2, groups).transpose(1, 2)
