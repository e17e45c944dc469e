"""Data and weight gradients of a convolution with operands copied by TMA; weights in chunks of a lane.

A box is a number of images, rows and columns of pixels that the GPU's copy engine (TMA) moves in one copy.
Pixels outside of an image read as zero and are not written. Channels are the rows of a product and pixels its
columns, because only the second operand of a product can be reshaped in shared memory without a copy.

Legend: as in `fused_layer`. Images are viewed as [N, H / S, S, W / S, S · C], so that a box can also hold
every S-th pixel. A box has BI images, BY rows and BX columns. C is the depth that is summed over, F the
channels of the result.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from lockstep.kernels.triton.conv.fused_layer import Layer
from lockstep.kernels.triton.conv.strided_gradient import taps
from lockstep.kernels.triton.conv.tile import ALL_TILES, OwnTiles, Tile
from lockstep.kernels.triton.conv.tma_box import Box, find_box, neighbours
from lockstep.kernels.triton.norm.norm_moments import Statistics


@triton.jit
def box_place(
    box, HIGH: tl.constexpr, WIDE: tl.constexpr, BI: tl.constexpr, BY: tl.constexpr, BX: tl.constexpr
):
    """The first image, row and column of a box; HIGH by WIDE boxes cover an image."""
    return box // (HIGH * WIDE) * BI, box // WIDE % HIGH * BY, box % WIDE * BX


@triton.jit
def _box_data(
    dz, w, other, y, out, z, lane_mean, rate, by_gamma, by_beta,
    C: tl.constexpr, F: tl.constexpr, KW: tl.constexpr, S: tl.constexpr, RY: tl.constexpr, RX: tl.constexpr,
    TY: tl.constexpr, TX: tl.constexpr, NY: tl.constexpr, NX: tl.constexpr,
    GY: tl.constexpr, GX: tl.constexpr, YH: tl.constexpr, YW: tl.constexpr,
    HIGH: tl.constexpr, WIDE: tl.constexpr,
    BI: tl.constexpr, BY: tl.constexpr, BX: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    HAS_OTHER: tl.constexpr, RELU: tl.constexpr, LANE: tl.constexpr, PRECISION: tl.constexpr,
    FIRST: tl.constexpr, TILES: tl.constexpr, FIRST_BOX: tl.constexpr,
):  # fmt: skip
    """out = products + other where y > 0, for one box and BN channels; `strided_gradient` explains RY to GX.

    LANE is the number of images of a lane. If it is not 0, the box's Σ out and Σ out · x̂ are also written,
    where x̂ is z normalized.
    """
    BM: tl.constexpr = BI * BY * BX
    BOXES: tl.constexpr = LANE // BI * HIGH * WIDE
    box = tl.program_id(0) // TILES + FIRST_BOX
    f = (tl.program_id(0) % TILES + FIRST) * BN
    i, row, col = box_place(box, HIGH, WIDE, BI, BY, BX)
    acc = tl.zeros((BN, BM), tl.float32)
    for k0 in range(0, NY * NX * C, BK):
        spot, k = k0 // C, k0 % C
        gt = dz.load([i, row + GY - spot // NX, 0, col + GX - spot % NX, k])
        tap = (TY + spot // NX * S) * KW + TX + spot % NX * S
        wt = w.load([tap * C + k, f])
        acc = tl.dot(wt.T, gt.reshape(BM, BK).T, acc, input_precision=PRECISION)
    value = acc.T
    if HAS_OTHER:
        value += other.load([i, row, RY, col, RX * F + f]).reshape(BM, BN).to(tl.float32)
    if RELU:
        seen = y.load([i, row + YH // S, YH % S, col + YW // S, YW % S * F + f]).reshape(BM, BN)
        value = tl.where(seen > 0, value, 0.0)
    result = value.to(out.dtype)
    out.store([i, row, RY, col, RX * F + f], result.reshape(BI, BY, 1, BX, BN))
    if LANE:
        c = f + tl.arange(0, BN)
        own = box // BOXES * F + c
        seen = z.load([i, row, RY, col, RX * F + f]).reshape(BM, BN).to(tl.float32)
        normal = (seen - tl.load(lane_mean + own)[None, :]) * tl.load(rate + own)[None, :]
        value = result.to(tl.float32)
        part = (box // BOXES * (S * S) + RY * S + RX) * BOXES + box % BOXES
        tl.store(by_beta + part * F + c, tl.sum(value, 0))
        tl.store(by_gamma + part * F + c, tl.sum(value * normal, 0))


@triton.jit
def _box_weight(
    g, x, out, row_size,
    CI: tl.constexpr, CO: tl.constexpr, KW: tl.constexpr, TAPS: tl.constexpr, S: tl.constexpr,
    TOP: tl.constexpr, LEFT: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr, SIZE: tl.constexpr,
    BI: tl.constexpr, BY: tl.constexpr, BX: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr, FIRST: tl.constexpr, FIRST_COLUMN: tl.constexpr,
):  # fmt: skip
    """BC by BK channels of each of TAPS neighbouring taps, 1 or 3, summed over a chunk of SIZE images."""
    BM: tl.constexpr = BI * BY * BX
    BOXES: tl.constexpr = SIZE // BI * HIGH * WIDE
    column = tl.program_id(0) + FIRST_COLUMN
    tap = column // (CI // BK) * TAPS
    ci = column % (CI // BK) * BK
    co = (tl.program_id(1) + FIRST) * BC
    part = tl.program_id(2)
    down, right = TOP + tap // KW, LEFT + tap % KW
    acc = tl.zeros((BC, BK), tl.float32)
    if TAPS == 3:
        acc1 = tl.zeros((BC, BK), tl.float32)
        acc2 = tl.zeros((BC, BK), tl.float32)
    for box in range(BOXES):
        i, row, col = box_place(box, HIGH, WIDE, BI, BY, BX)
        gt = g.load([(part * BOXES + box) * BM, co]).T
        i, row = part * SIZE + i, row + down // S
        xt = x.load([i, row, down % S, col + right // S, right % S * CI + ci])
        acc = tl.dot(gt, xt.reshape(BM, BK), acc, input_precision=PRECISION)
        if TAPS == 3:
            xt = x.load([i, row, down % S, col + (right + 1) // S, (right + 1) % S * CI + ci])
            acc1 = tl.dot(gt, xt.reshape(BM, BK), acc1, input_precision=PRECISION)
            xt = x.load([i, row, down % S, col + (right + 2) // S, (right + 2) % S * CI + ci])
            acc2 = tl.dot(gt, xt.reshape(BM, BK), acc2, input_precision=PRECISION)
    out += part.to(tl.int64) * row_size + tap * (CO * CI)
    place = (co + tl.arange(0, BC))[:, None] * CI + (ci + tl.arange(0, BK))[None, :]
    tl.store(out + place, acc)
    if TAPS == 3:
        tl.store(out + place + CO * CI, acc1)
        tl.store(out + place + 2 * (CO * CI), acc2)


def box_data_grad(
    layer: Layer, dz: Tensor, weight: Tensor, out: Tensor, tile: Tile, *, other: Tensor | None = None,
    y: Tensor | None = None, norm: tuple[Tensor, Statistics] | None = None, precision: str = "ieee",
    own: OwnTiles = ALL_TILES,
) -> None:  # fmt: skip
    """Compute out [N, H, W, CI] from dz [N, OH, OW, CO], plus `other`; 0 where y, with a border, is ≤ 0.

    `norm` is the z and the statistics of the norm before. If it is given, partial sums for the gradient of
    that norm are also written, to its tables of parts. Only `own` tiles are computed.
    """
    stride = layer.stride
    high, wide = layer.height // stride, layer.width // stride
    box, channels = find_box(tile.rows, high, wide), layer.in_channels
    border = (0, 0) if y is None else ((y.shape[1] - layer.height) // 2, (y.shape[2] - layer.width) // 2)
    tables = (
        as_boxes(dz, box, tile.depth), as_matrix(weight, layer.in_channels, tile.depth, tile.cols),
        None if other is None else as_boxes(other, box, tile.cols, stride),
        None if y is None else as_boxes(y, box, tile.cols, stride), as_boxes(out, box, tile.cols, stride),
    )  # fmt: skip
    sums: tuple[object, ...] = (None,) * 5
    lane_size = 0
    if norm:
        z, stats = norm
        known, found = (stats.mean, stats.rate), (stats.first_parts, stats.second_parts)
        sums, lane_size = (as_boxes(z, box, tile.cols, stride), *known, *found), len(dz) // len(stats.mean)
    tiles, boxes = own.of(channels // tile.cols, count_boxes(box, len(dz), high, wide))
    for ry in range(stride):
        for rx in range(stride):
            ty, ny = taps(ry, layer.kernel[0], layer.pad[0], stride)
            tx, nx = taps(rx, layer.kernel[1], layer.pad[1], stride)
            _box_data[(len(boxes) * len(tiles),)](
                *tables, *sums,
                C=layer.out_channels, F=channels, KW=layer.kernel[1], S=stride, RY=ry, RX=rx,
                TY=ty, TX=tx, NY=ny, NX=nx,
                GY=(ry + layer.pad[0] - ty) // stride, GX=(rx + layer.pad[1] - tx) // stride,
                YH=border[0] + ry, YW=border[1] + rx, HAS_OTHER=other is not None, RELU=y is not None,
                LANE=lane_size, PRECISION=precision, BN=tile.cols, BK=tile.depth,
                FIRST=tiles.start, TILES=len(tiles), FIRST_BOX=boxes.start,
                **box_sizes(box, high, wide, tile),
            )  # fmt: skip


def box_weight_grad(
    layer: Layer, g: Tensor, x: Tensor, out: Tensor, tile: Tile, *, precision: str = "ieee",
    own: OwnTiles = ALL_TILES,
) -> None:  # fmt: skip
    """Compute the parts of each lane's gradient, out [lanes · chunks, KH · KW · CO · CI], from g and x.

    Only `own` tiles are computed.
    """
    (high, wide), (_, _, top, left) = layer.conv_size, layer.place_in(x.shape)
    box, together = find_box(tile.depth, high, wide), neighbours(layer, tile)
    columns = layer.depth // tile.cols // together
    channels, across = own.of(layer.out_channels // tile.rows, columns)
    _box_weight[(len(across), len(channels), len(out))](
        as_matrix(g, layer.out_channels, tile.depth, tile.rows), as_boxes(x, box, tile.cols, layer.stride),
        out, out.stride(0),
        CI=layer.in_channels, CO=layer.out_channels, KW=layer.kernel[1], TAPS=together, S=layer.stride,
        TOP=top, LEFT=left, SIZE=len(x) // len(out), PRECISION=precision, BC=tile.rows, BK=tile.cols,
        FIRST=channels.start, FIRST_COLUMN=across.start,
        **box_sizes(box, high, wide, tile),
    )  # fmt: skip


def box_sizes(box: Box, high: int, wide: int, tile: Tile, fuses: bool = True) -> dict[str, int | bool]:
    """The launch arguments that all kernels with boxes share."""
    sizes = {"HIGH": high // box.rows, "WIDE": wide // box.cols, "BI": box.images, "BY": box.rows}
    options = {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": fuses}
    return {**sizes, "BX": box.cols, **options}


def count_boxes(box: Box, samples: int, high: int, wide: int) -> int:
    return -(-samples // box.images) * (high // box.rows) * (wide // box.cols)


def as_boxes(images: Tensor, box: Box, channels: int, stride: int = 1) -> TensorDescriptor:
    """A TMA descriptor for boxes of every `stride`-th pixel of images [N, H, W, C]."""
    count, high, wide, depth = images.shape
    seen = images.view(count, high // stride, stride, wide // stride, stride * depth)
    return TensorDescriptor.from_tensor(seen, [box.images, box.rows, 1, box.cols, channels])


def as_matrix(values: Tensor, width: int, rows: int, cols: int) -> TensorDescriptor:
    """A TMA descriptor for blocks, rows by cols, of a matrix [·, width]."""
    return TensorDescriptor.from_tensor(values.view(-1, width), [rows, cols])
