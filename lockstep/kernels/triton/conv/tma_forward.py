"""Forward convolution with operands copied by TMA; writes partial batch statistics, or applies a norm."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.triton.conv.fused_layer import Layer
from lockstep.kernels.triton.conv.tile import ALL_TILES, OwnTiles, Tile
from lockstep.kernels.triton.conv.tma_box import find_box
from lockstep.kernels.triton.conv.tma_gradient import as_boxes, as_matrix, box_place, box_sizes, count_boxes


@dataclass(frozen=True)
class Ending:
    """What follows a convolution whose norm has known statistics: ReLU(z · factor + shift + residual)."""

    factor: Tensor  # [F]
    shift: Tensor
    residual: Tensor | None  # with a border of its own
    relu: bool


@triton.jit
def _box_conv(
    x, w, out, mean, square, factor, shift, residual,
    C: tl.constexpr, F: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, S: tl.constexpr,
    TOP: tl.constexpr, LEFT: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
    BH: tl.constexpr, BW: tl.constexpr, RH: tl.constexpr, RW: tl.constexpr,
    BI: tl.constexpr, BY: tl.constexpr, BX: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    MOMENTS: tl.constexpr, ENDS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, RELU: tl.constexpr,
    PRECISION: tl.constexpr, FIRST: tl.constexpr, TILES: tl.constexpr, FIRST_BOX: tl.constexpr,
):  # fmt: skip
    """out = w · x for one box and BN channels.

    With MOMENTS, also each channel's mean and squared deviations over the box. With ENDS, also what follows
    the convolution (see `Ending`); out then has a border (BH, BW).
    """
    BM: tl.constexpr = BI * BY * BX
    box = tl.program_id(0) // TILES + FIRST_BOX
    f = (tl.program_id(0) % TILES + FIRST) * BN
    i, row, col = box_place(box, HIGH, WIDE, BI, BY, BX)
    acc = tl.zeros((BN, BM), tl.float32)
    for k0 in range(0, KH * KW * C, BK):
        tap, k = k0 // C, k0 % C
        down, right = TOP + tap // KW, LEFT + tap % KW
        xt = x.load([i, row + down // S, down % S, col + right // S, right % S * C + k])
        wt = w.load([tap * F + f, k])
        acc = tl.dot(wt, xt.reshape(BM, BK).T, acc, input_precision=PRECISION)
    value = acc.to(out.dtype)
    if MOMENTS:
        value32 = value.to(tl.float32)
        own = tl.sum(value32, 1) * (1.0 / BM)
        away = value32 - own[:, None]
        place = box * F + f + tl.arange(0, BN)
        tl.store(mean + place, own)
        tl.store(square + place, tl.sum(away * away, 1))
    result = value.T
    if ENDS:
        c = f + tl.arange(0, BN)
        full = result.to(tl.float32) * tl.load(factor + c)[None, :] + tl.load(shift + c)[None, :]
        if HAS_RESIDUAL:
            full += residual.load([i, row + RH, 0, col + RW, f]).reshape(BM, BN).to(tl.float32)
        if RELU:
            full = tl.maximum(full, 0.0, propagate_nan=tl.PropagateNan.ALL)
        result = full.to(out.dtype)
    out.store([i, row + BH, 0, col + BW, f], result.reshape(BI, BY, 1, BX, BN))


def box_conv(
    layer: Layer, x: Tensor, weight: Tensor, out: Tensor, tile: Tile, *,
    moments: tuple[Tensor, Tensor] | None = None, ending: Ending | None = None, precision: str = "ieee",
    own: OwnTiles = ALL_TILES,
) -> None:  # fmt: skip
    """Compute out [N, OH, OW, CO] from x [N, *in_shape], which may have a wider border.

    `moments` are two tables for the mean and squared deviations of each box. With an `ending`, `out` may have
    a border; the ending rounds as `norm_forward.apply` does. Only `own` tiles are computed.
    """
    (high, wide), stride = layer.conv_size, layer.stride
    box, (_, _, top, left) = find_box(tile.rows, high, wide), layer.place_in(x.shape)
    mean, square = moments or (None, None)
    residual = ending.residual if ending else None
    (bh, bw), (rh, rw) = (
        (0, 0) if image is None else layer.border_in(image.shape) for image in (out, residual)
    )
    channels, boxes = own.of(layer.out_channels // tile.cols, count_boxes(box, len(x), high, wide))
    _box_conv[(len(boxes) * len(channels),)](
        as_boxes(x, box, tile.depth, stride), as_matrix(weight, layer.in_channels, tile.cols, tile.depth),
        as_boxes(out, box, tile.cols), mean, square,
        ending.factor if ending else None, ending.shift if ending else None,
        None if residual is None else as_boxes(residual, box, tile.cols),
        C=layer.in_channels, F=layer.out_channels, KH=layer.kernel[0], KW=layer.kernel[1], S=stride,
        TOP=top, LEFT=left, BH=bh, BW=bw, RH=rh, RW=rw, MOMENTS=moments is not None, ENDS=ending is not None,
        HAS_RESIDUAL=residual is not None, RELU=bool(ending and ending.relu), PRECISION=precision,
        BN=tile.cols, BK=tile.depth, FIRST=channels.start, TILES=len(channels), FIRST_BOX=boxes.start,
        **box_sizes(box, high, wide, tile, fuses=ending is None),
    )  # fmt: skip
