"""Data gradient of a convolution with any stride; adds the residual's gradient and applies the ReLU's mask.

With stride S, only every S-th tap of the kernel reaches a given pixel of the input. Which taps these are
depends on the pixel's row and column modulo S. Pixels with the same remainders (RY, RX) are of one kind, and
every kind has its own launch. So no product with zero is computed.

Legend: as in `fused_layer`. A kind (RY, RX) has U rows and V columns of pixels. NY by NX taps reach each of
them, the first of which is (TY, TX).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.triton.conv.fused_layer import Layer
from lockstep.kernels.triton.conv.tile import ALL_TILES, OwnTiles, Tile
from lockstep.kernels.triton.exact_division import divide


@triton.jit
def _data_grad(
    dz, w, other, y, out, total,
    GH: tl.constexpr, GW: tl.constexpr, CO: tl.constexpr, H: tl.constexpr, W: tl.constexpr, CI: tl.constexpr,
    KW: tl.constexpr, S: tl.constexpr, RY: tl.constexpr, RX: tl.constexpr, U: tl.constexpr, V: tl.constexpr,
    TY: tl.constexpr, TX: tl.constexpr, NY: tl.constexpr, NX: tl.constexpr,
    GY: tl.constexpr, GX: tl.constexpr, YH: tl.constexpr, YW: tl.constexpr,
    HAS_OTHER: tl.constexpr, RELU: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """One tile, BM pixels of one kind by BN channels: out = products + other where y > 0, else 0.

    GY, GX are the row and column of dz that the first tap of the first pixel reads.
    """
    K: tl.constexpr = NY * NX * CO
    q = tl.program_id(0) * BM + tl.arange(0, BM)
    real = q < total
    q = tl.minimum(q, total - 1)
    n, pixel = q // (U * V), q % (U * V)
    u, v = pixel // V, pixel % V
    corner = ((n * GH + u + GY) * GW + v + GX) * CO
    ci = (tl.program_id(1) + FIRST) * BN + tl.arange(0, BN)
    inside = ci < CI
    acc = tl.zeros((BM, BN), tl.float32)
    if K > 0:
        for k0 in range(0, K, BK):
            if CO % BK == 0:  # all BK columns belong to one tap, so its offset is a scalar
                spot = k0 // CO
                co = tl.multiple_of(k0 % CO, BK) + tl.arange(0, BK)
                gt = tl.load(dz + corner[:, None] + (co - (spot // NX * GW + spot % NX) * CO)[None, :])
                tap = (TY + spot // NX * S) * KW + TX + spot % NX * S
                place = tap * (CO * CI) + co * CI
                wt = tl.load(w + place[:, None] + ci[None, :], mask=inside[None, :], other=0.0)
            else:
                k = k0 + tl.arange(0, BK)
                known = k < K
                spot, co = divide(k, CO, K)
                across, along = divide(spot, NX, K)
                here = tl.where(known, co - (across * GW + along) * CO, 0)
                gt = tl.load(dz + corner[:, None] + here[None, :])
                tap = (TY + across * S) * KW + TX + along * S
                place = tap * (CO * CI) + co * CI
                wt = tl.load(
                    w + place[:, None] + ci[None, :], mask=known[:, None] & inside[None, :], other=0.0
                )
            acc = tl.dot(gt, wt, acc, input_precision=PRECISION)
    mask = real[:, None] & inside[None, :]
    row, col = u * S + RY, v * S + RX
    place = ((n * H + row) * W + col)[:, None] * CI + ci[None, :]
    if HAS_OTHER:
        acc += tl.load(other + place, mask=mask, other=0.0).to(tl.float32)
    if RELU:
        seen = ((n * (H + 2 * YH) + row + YH) * (W + 2 * YW) + col + YW)[:, None] * CI + ci[None, :]
        acc = tl.where(tl.load(y + seen, mask=mask, other=0.0) > 0, acc, 0.0)
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=mask)


def data_grad(
    layer: Layer, dz: Tensor, weight: Tensor, out: Tensor, tile: Tile, *, other: Tensor | None = None,
    y: Tensor | None = None, precision: str = "ieee", own: OwnTiles = ALL_TILES,
) -> None:  # fmt: skip
    """Compute out [N, H, W, CI] from dz [N, *grad_shape], plus `other`; 0 where y, with a border, is ≤ 0.

    Only `own` tiles are computed.
    """
    channels, _ = own.of(triton.cdiv(layer.in_channels, tile.cols), 1)
    (gh, gw, co), (bh, bw), stride = layer.grad_shape, layer.grad_border, layer.stride
    high, wide = layer.height, layer.width
    border = (0, 0) if y is None else ((y.shape[1] - high) // 2, (y.shape[2] - wide) // 2)
    for ry in range(min(stride, high)):
        for rx in range(min(stride, wide)):
            ty, ny = taps(ry, layer.kernel[0], layer.pad[0], stride)
            tx, nx = taps(rx, layer.kernel[1], layer.pad[1], stride)
            u, v = -(-(high - ry) // stride), -(-(wide - rx) // stride)
            total = len(dz) * u * v
            grid = (triton.cdiv(total, tile.rows), len(channels))
            _data_grad[grid](
                dz, weight, other, y, out, total,
                GH=gh, GW=gw, CO=co, H=high, W=wide, CI=layer.in_channels, KW=layer.kernel[1],
                S=stride, RY=ry, RX=rx, U=u, V=v, TY=ty, TX=tx, NY=ny, NX=nx,
                GY=bh + (ry + layer.pad[0] - ty) // stride, GX=bw + (rx + layer.pad[1] - tx) // stride,
                YH=border[0], YW=border[1], HAS_OTHER=other is not None, RELU=y is not None,
                PRECISION=precision, BM=tile.rows, BN=tile.cols, BK=tile.depth, FIRST=channels.start,
                num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=True,
            )  # fmt: skip


def taps(kind: int, kernel: int, pad: int, stride: int) -> tuple[int, int]:
    """The first tap that reaches the rows or columns of this kind, and the number of such taps."""
    first = (kind + pad) % stride
    return first, max(0, -(-(kernel - first) // stride))
