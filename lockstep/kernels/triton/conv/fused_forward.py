"""The forward pass of a fused layer in one launch: convolution, bias, ReLU, pooling or dropout."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.triton.conv.fused_layer import Layer
from lockstep.kernels.triton.conv.tile import ALL_TILES, OwnTiles, Tile
from lockstep.kernels.triton.exact_division import divide
from lockstep.kernels.triton.keyed_bits import keep_element


@triton.jit
def columns(k, K: tl.constexpr, CI: tl.constexpr, KW: tl.constexpr, ROW: tl.constexpr):
    """The offset of im2col column k, of K columns, from the upper left pixel of its window."""
    tap, channel = divide(k, CI, K)
    row, col = divide(tap, KW, K)
    return row * ROW + col * CI + channel


@triton.jit
def _forward(
    x, w, bias, out, code, keys, total, lane_size,
    HP: tl.constexpr, WP: tl.constexpr, TOP: tl.constexpr, LEFT: tl.constexpr,
    CI: tl.constexpr, CO: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    BH: tl.constexpr, BW: tl.constexpr,
    STRIDE: tl.constexpr, BIAS: tl.constexpr,
    POOL: tl.constexpr, RELU: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """One tile: BM pixels of the convolution by BN channels.

    With pooling, the rows are ordered so that one thread of a warp group holds all four pixels of a window
    (row a, column b). The largest is then found in registers.
    """
    K: tl.constexpr = KH * KW * CI
    rows = tl.arange(0, BM)
    if POOL == 2:
        a, b = rows // (BM // 2), (rows // 8) % 2
        own = (rows // 16) % (BM // 32) * 8 + rows % 8
        q = tl.program_id(0) * (BM // 4) + own
    else:
        a, b = rows * 0, rows * 0
        q = tl.program_id(0) * BM + rows
    q = tl.minimum(q, total - 1)
    n, pixel = q // (PH * PW), q % (PH * PW)
    oy, ox = pixel // PW * POOL + a, pixel % PW * POOL + b
    corner = ((n * HP + oy * STRIDE + TOP) * WP + ox * STRIDE + LEFT) * CI
    co = (tl.program_id(1) + FIRST) * BN + tl.arange(0, BN)
    inside = co < CO
    acc = tl.zeros((BM, BN), tl.float32)
    for k0 in range(0, K, BK):
        if CI % BK == 0:  # all BK columns belong to one tap, so its offset is a scalar
            tap = k0 // CI
            k = tl.multiple_of(k0 % CI, BK) + tl.arange(0, BK)
            here = (tap // KW) * (WP * CI) + (tap % KW) * CI + k
            xt = tl.load(x + corner[:, None] + here[None, :])
            wt = tl.load(w + tap * (CO * CI) + co[None, :] * CI + k[:, None], mask=inside[None, :], other=0.0)
        else:
            k = k0 + tl.arange(0, BK)
            known = k < K
            here = tl.where(known, columns(k, K, CI, KW, WP * CI), 0)
            if CI % 4 == 0:
                here = tl.multiple_of(tl.max_contiguous(here, 4), 4)
            xt = tl.load(x + corner[:, None] + here[None, :])
            tap, channel = divide(k, CI, K)
            place = tap * (CO * CI) + channel
            if CI % 2 == 0:
                place = tl.multiple_of(tl.max_contiguous(place, CI & -CI), CI & -CI)
            wt = tl.load(
                w + place[:, None] + co[None, :] * CI, mask=known[:, None] & inside[None, :], other=0.0
            )
        acc = tl.dot(xt, wt, acc, input_precision=PRECISION)
    if BIAS:
        acc += tl.load(bias + co, mask=inside, other=0.0)[None, :]
    if POOL == 2:
        parts = tl.permute(tl.reshape(acc, (2, BM // 32, 2, 8, BN)), (1, 3, 4, 0, 2))
        left, right = tl.split(parts)
        v0, v2 = tl.split(left)
        v1, v3 = tl.split(right)
        best, which = v0, tl.zeros(v0.shape, tl.int32)
        best, which = _larger(best, which, v1, 1)
        best, which = _larger(best, which, v2, 2)
        best, which = _larger(best, which, v3, 3)
        if RELU:
            which = tl.where(best <= 0, 4, which)
            best = tl.maximum(best, 0.0, propagate_nan=tl.PropagateNan.ALL)
        acc = tl.reshape(best, (BM // 4, BN))
        which = tl.reshape(which, (BM // 4, BN))
        q = tl.program_id(0) * (BM // 4) + tl.arange(0, BM // 4)
        real = (q < total)[:, None] & inside[None, :]
        tl.store(code + q[:, None] * CO + co[None, :], which.to(tl.uint8), mask=real)
        n, pixel = q // (PH * PW), q % (PH * PW)
    else:
        q = tl.program_id(0) * BM + rows
        real = (q < total)[:, None] & inside[None, :]
        if RELU:
            acc = tl.maximum(acc, 0.0, propagate_nan=tl.PropagateNan.ALL)
        if DROPOUT > 0.0:
            lane, row = n // lane_size, q - n // lane_size * lane_size * (PH * PW)
            key = tl.load(keys + lane)
            kept = keep_element(key[:, None], (row[:, None] * CO + co[None, :]).to(tl.int64), DROPOUT)
            acc = tl.where(kept, acc * (1.0 / (1.0 - DROPOUT)), 0.0)
    place = ((n * (PH + 2 * BH) + pixel // PW + BH) * (PW + 2 * BW) + pixel % PW + BW) * CO
    tl.store(out + place[:, None] + co[None, :], acc.to(out.dtype.element_ty), mask=real)


@triton.jit
def _larger(best, which, value, number):
    """The larger of two values, and its number; the first one if they are equal; a NaN wins."""
    wins = (value > best) | (value != value)
    return tl.where(wins, value, best), tl.where(wins, number, which)


def forward(
    layer: Layer, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, code: Tensor | None,
    tile: Tile, *, out_border: tuple[int, int] = (0, 0), keys: Tensor | None = None, lane_size: int = 1,
    precision: str = "ieee", own: OwnTiles = ALL_TILES,
) -> None:  # fmt: skip
    """Compute out [N, PH, PW, CO], inside its border, from x [N, *in_shape].

    `code` gets the pixel of each window that max pooling took, or 4 if the ReLU let none through. `weight` is
    [KH · KW, CO, CI] in the type of x. `keys` has a dropout key for each lane. x may have a wider border than
    the layer reads. Only `own` tiles are computed.
    """
    (ph, pw), ci, co = layer.out_size, layer.in_channels, layer.out_channels
    hp, wp, top, left = layer.place_in(x.shape)
    total = len(x) * ph * pw
    bm, bn, bk = tile.rows, tile.cols, tile.depth
    channels, _ = own.of(triton.cdiv(co, bn), 1)
    grid = (triton.cdiv(total, bm // layer.pool**2), len(channels))
    _forward[grid](
        x, weight, bias, out, code, keys, total, lane_size,
        HP=hp, WP=wp, TOP=top, LEFT=left, CI=ci, CO=co, KH=layer.kernel[0], KW=layer.kernel[1], PH=ph, PW=pw,
        BH=out_border[0], BW=out_border[1], STRIDE=layer.stride, BIAS=layer.bias,
        POOL=layer.pool, RELU=layer.relu, DROPOUT=layer.dropout, PRECISION=precision,
        BM=bm, BN=bn, BK=bk, FIRST=channels.start,
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=True,
    )  # fmt: skip
