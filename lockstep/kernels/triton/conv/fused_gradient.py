"""The backward pass of a fused layer: gradients of its input, and of its weight and bias lane by lane.

Both kernels read the gradient of the convolution's output, before ReLU and pooling. The kernel that wrote it
(the input gradient of the next layer, or the loss) put each value at the pixel that pooling took, so that it
can be read without a mask.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.triton.conv.fused_forward import columns
from lockstep.kernels.triton.conv.fused_layer import Layer
from lockstep.kernels.triton.conv.tile import ALL_TILES, OwnTiles, Tile
from lockstep.kernels.triton.exact_division import divide


@triton.jit
def _input_grad(
    g, w, x, code, out, total,
    GH: tl.constexpr, GW: tl.constexpr, CO: tl.constexpr,
    H: tl.constexpr, W: tl.constexpr, CI: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, XH: tl.constexpr, XW: tl.constexpr,
    PW: tl.constexpr, PC: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    BH: tl.constexpr, BW: tl.constexpr,
    POOL: tl.constexpr, RELU: tl.constexpr, SCALE: tl.constexpr, COMPACT: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """One tile: BM input pixels by BN channels; out is the gradient [N, OH, OW, PC] of the layer before.

    PW, PC, POOL, RELU and SCALE describe the layer before, whose output is the input of this layer.
    """
    K: tl.constexpr = KH * KW * CO
    q = tl.program_id(0) * BM + tl.arange(0, BM)
    real = q < total
    q = tl.minimum(q, total - 1)
    n, pixel = q // (H * W), q % (H * W)
    y, x_ = pixel // W, pixel % W
    corner = ((n * GH + y) * GW + x_) * CO
    ci = (tl.program_id(1) + FIRST) * BN + tl.arange(0, BN)
    inside = ci < CI
    acc = tl.zeros((BM, BN), tl.float32)
    for k0 in range(0, K, BK):
        if CO % BK == 0:
            tap = k0 // CO
            co = tl.multiple_of(k0 % CO, BK) + tl.arange(0, BK)
            here = ((KH - 1 - tap // KW) * GW + KW - 1 - tap % KW) * CO + co
            gt = tl.load(g + corner[:, None] + here[None, :])
            wt = tl.load(
                w + tap * (CO * CI) + co[:, None] * CI + ci[None, :], mask=inside[None, :], other=0.0
            )
        else:
            k = k0 + tl.arange(0, BK)
            known = k < K
            tap, co = divide(k, CO, K)
            across, along = divide(tap, KW, K)
            here = ((KH - 1 - across) * GW + KW - 1 - along) * CO + co
            gt = tl.load(g + corner[:, None] + tl.where(known, here, 0)[None, :])
            wt = tl.load(w + k[:, None] * CI + ci[None, :], mask=known[:, None] & inside[None, :], other=0.0)
        acc = tl.dot(gt, wt, acc, input_precision=PRECISION)
    mask = real[:, None] & inside[None, :]
    # The pixel and channel in the layer before. In a fully connected layer that flattens an image, `ci`
    # counts the pixels and channels of that image.
    spot = ci // PC
    py, px, channel = (
        y[:, None] + (spot // PW)[None, :],
        x_[:, None] + (spot % PW)[None, :],
        (ci % PC)[None, :],
    )
    if POOL == 2:
        place = n[:, None] * (H * W * CI) + pixel[:, None] * CI + ci[None, :]
        if COMPACT:
            tl.store(out + place, acc.to(out.dtype.element_ty), mask=mask)
        else:
            which = tl.load(code + place, mask=mask, other=4)
            base = n[:, None] * ((OH + 2 * BH) * (OW + 2 * BW) * PC) + channel
            for s in tl.static_range(4):
                row, col = 2 * py + s // 2 + BH, 2 * px + s % 2 + BW
                value = tl.where(which == s, acc, 0.0)
                spot_ptr = out + base + (row * (OW + 2 * BW) + col) * PC
                tl.store(spot_ptr, value.to(out.dtype.element_ty), mask=mask)
    else:
        if RELU:
            seen = tl.load(
                x + ((n * (H + 2 * XH) + y + XH) * (W + 2 * XW) + x_ + XW)[:, None] * CI + ci[None, :],
                mask=mask, other=0.0,
            )  # fmt: skip
            acc = tl.where(seen > 0, acc * SCALE, 0.0)
        row, col = py + BH, px + BW
        place = ((n[:, None] * (OH + 2 * BH) + row) * (OW + 2 * BW) + col) * PC + channel
        tl.store(out + place, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _weight_grad(
    g, code, x, out, out_bias, row,
    HP: tl.constexpr, WP: tl.constexpr, TOP: tl.constexpr, LEFT: tl.constexpr,
    CI: tl.constexpr, CO: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    BH: tl.constexpr, BW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    COMPACT: tl.constexpr, LANE: tl.constexpr, CHUNKS: tl.constexpr, PRECISION: tl.constexpr,
    STRIDE: tl.constexpr, BIAS: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr,
    FIRST: tl.constexpr, FIRST_COLUMN: tl.constexpr,
):  # fmt: skip
    """One tile: BC channels by BK im2col columns, summed over the pixels of one chunk of one lane."""
    K: tl.constexpr = KH * KW * CI
    GH: tl.constexpr = OH + 2 * BH
    GW: tl.constexpr = OW + 2 * BW
    part = tl.program_id(2)
    lane, chunk = part // CHUNKS, part % CHUNKS
    SIZE: tl.constexpr = (LANE + CHUNKS - 1) // CHUNKS
    first = chunk * SIZE
    MH: tl.constexpr = PH if COMPACT else OH
    MW: tl.constexpr = PW if COMPACT else OW
    count = (tl.minimum(first + SIZE, LANE) - first) * (MH * MW)
    k = (tl.program_id(0) + FIRST_COLUMN) * BK + tl.arange(0, BK)
    tap = k // CI
    here = tl.where(k < K, columns(k, K, CI, KW, WP * CI), 0)
    if CI % 16 == 0:
        here = tl.multiple_of(tl.max_contiguous(here, 16), 16)
    elif CI % 4 == 0:
        here = tl.multiple_of(tl.max_contiguous(here, 4), 4)
    co = (tl.program_id(1) + FIRST) * BC + tl.arange(0, BC)
    inside = co < CO
    acc = tl.zeros((BC, BK), tl.float32)
    ones = tl.full((BM, 16), 1.0, x.dtype.element_ty)
    acc_bias = tl.zeros((BC, 16), tl.float32)
    with_bias = tl.program_id(0) + FIRST_COLUMN == 0
    for m0 in range(0, SIZE * MH * MW, BM):
        m = m0 + tl.arange(0, BM)
        real = m < count
        n, pixel = lane * LANE + tl.minimum(first + m // (MH * MW), LANE - 1), m % (MH * MW)
        y, x_ = pixel // MW, pixel % MW
        if COMPACT:  # g has one value for each pooled pixel, which belongs to one of its four pixels
            place = ((n * PH + y) * PW + x_) * CO
            mask = real[:, None] & inside[None, :]
            value = tl.load(g + place[:, None] + co[None, :], mask=mask, other=0.0)
            which = tl.load(code + place[:, None] + co[None, :], mask=mask, other=4)
            corner = ((n * HP + 2 * y) * WP + 2 * x_) * CI
            for s in tl.static_range(4):
                xt = tl.load(x + corner[:, None] + here[None, :] + (s // 2 * WP + s % 2) * CI)
                gt = tl.where(which == s, value, 0.0).to(value.dtype)
                acc = tl.dot(tl.trans(gt), xt, acc, input_precision=PRECISION)
            if BIAS:
                if with_bias:
                    gt = tl.where(which < 4, value, 0.0).to(value.dtype)
                    acc_bias = tl.dot(tl.trans(gt), ones, acc_bias, input_precision=PRECISION)
        else:
            corner = ((n * HP + y * STRIDE + TOP) * WP + x_ * STRIDE + LEFT) * CI
            xt = tl.load(x + corner[:, None] + here[None, :])
            place = ((n * GH + y + BH) * GW + x_ + BW) * CO
            gt = tl.load(g + place[:, None] + co[None, :], mask=real[:, None] & inside[None, :], other=0.0)
            acc = tl.dot(tl.trans(gt), xt, acc, input_precision=PRECISION)
            if BIAS:
                if with_bias:
                    acc_bias = tl.dot(tl.trans(gt), ones, acc_bias, input_precision=PRECISION)
    place = tap * (CO * CI) + k % CI
    out += part.to(tl.int64) * row
    tl.store(out + place[None, :] + co[:, None] * CI, acc, mask=(k < K)[None, :] & inside[:, None])
    if BIAS:
        if with_bias:
            column = tl.sum(tl.where(tl.arange(0, 16)[None, :] == 0, acc_bias, 0.0), 1)
            tl.store(out_bias + part.to(tl.int64) * row + co, column, mask=inside)


def input_grad(
    layer: Layer, before: Layer, g: Tensor, weight: Tensor, x: Tensor, code: Tensor | None, out: Tensor,
    tile: Tile, *, compact: bool = False, precision: str = "ieee", own: OwnTiles = ALL_TILES,
) -> None:  # fmt: skip
    """Compute the gradient of the layer `before`, whose output is `x`, from g [N, *grad_shape].

    It has the size of that layer's convolution and a border, or with `compact` the size of its pooled output.
    Only `own` tiles are computed.
    """
    (gh, gw, co), (oh, ow), (bh, bw) = layer.grad_shape, before.conv_size, before.grad_border
    total = len(g) * layer.height * layer.width
    channels, _ = own.of(triton.cdiv(layer.in_channels, tile.cols), 1)
    grid = (triton.cdiv(total, tile.rows), len(channels))
    _input_grad[grid](
        g, weight, x, code, out, total,
        GH=gh, GW=gw, CO=co, H=layer.height, W=layer.width, CI=layer.in_channels,
        KH=layer.kernel[0], KW=layer.kernel[1], XH=layer.pad[0], XW=layer.pad[1],
        PW=before.out_size[1], PC=before.out_channels, OH=oh, OW=ow, BH=bh, BW=bw,
        POOL=before.pool, RELU=before.relu, SCALE=1.0 / (1.0 - before.dropout), COMPACT=compact,
        PRECISION=precision, BM=tile.rows, BN=tile.cols, BK=tile.depth, FIRST=channels.start,
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=True,
    )  # fmt: skip


def weight_grad(
    layer: Layer, g: Tensor, code: Tensor | None, x: Tensor, out: Tensor, out_bias: Tensor | None, lanes: int,
    tile: Tile, *, compact: bool = False, precision: str = "ieee", own: OwnTiles = ALL_TILES,
) -> None:  # fmt: skip
    """Parts of each lane's gradient: out [lanes · chunks, KH · KW · CO · CI], out_bias [lanes · chunks, CO].

    Both are columns of one table of parts. g is [N, OH, OW, CO] inside any border. With `compact` it is
    [N, *out_shape], and `code` has the pixel that each value belongs to. Only `own` tiles are computed.
    """
    (oh, ow), ci, co = layer.conv_size, layer.in_channels, layer.out_channels
    hp, wp, top, left = layer.place_in(x.shape)
    chunks, border = len(out) // lanes, (0, 0) if compact else layer.border_in(g.shape)
    assert out_bias is None or out.stride(0) == out_bias.stride(0)
    channels, across = own.of(triton.cdiv(co, tile.rows), triton.cdiv(layer.depth, tile.cols))
    grid = (len(across), len(channels), lanes * chunks)
    _weight_grad[grid](
        g, code, x, out, out_bias, out.stride(0),
        HP=hp, WP=wp, TOP=top, LEFT=left, CI=ci, CO=co, KH=layer.kernel[0], KW=layer.kernel[1],
        OH=oh, OW=ow, BH=border[0], BW=border[1],
        PH=layer.out_size[0], PW=layer.out_size[1], COMPACT=compact, LANE=len(x) // lanes,
        CHUNKS=chunks, PRECISION=precision, STRIDE=layer.stride, BIAS=layer.bias,
        BM=tile.depth, BC=tile.rows, BK=tile.cols, FIRST=channels.start, FIRST_COLUMN=across.start,
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=True,
    )  # fmt: skip
