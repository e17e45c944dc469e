"""The weight gradient of a depthwise convolution by matrix units, in types of 16 bits.

A product of blocks gives the sums over rows for all pairs of taps and of BC channels, of which only those of
a channel with itself are wanted: 1 in BC. Yet matrix units are so much faster than others that this pays, as
each value is loaded for a row and a column of taps, not for every tap.

A row (n, i, ow) is a row i of an image and a column ow of outputs: tap (a, b) multiplies the input's column
that b sees from ow by the gradient of the output whose a sees i.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.triton.conv.depthwise import Depthwise
from lockstep.kernels.triton.norm.norm_forward import Norm, chunk_rows
from lockstep.kernels.triton.norm.norm_gradient import join_parts

_CHANNELS, _ROWS = 16, 64  # of a block; a matrix unit takes no fewer channels
_MOST_TAPS = 8  # in a row or column of a filter
_PROGRAMS = 1024  # about how many programs it is cut into


def takes_matrix(layer: Depthwise, dtype: torch.dtype) -> bool:
    """Whether the type is exact in matrix units, and all taps fit into a block."""
    return dtype in (torch.bfloat16, torch.float16) and max(layer.kernel) <= _MOST_TAPS


def matrix_sums(layer: Depthwise, lane_size: int, total_lanes: int) -> Norm:
    """How it is summed: rows as above, columns the values of a filter."""
    height, width = layer.image[0], layer.out[1]
    rows, blocks = lane_size * height * width, triton.cdiv(layer.channels, _CHANNELS)
    chunks = 1
    while 2 * chunks * total_lanes * blocks <= _PROGRAMS and 2 * chunks * _ROWS <= rows:
        chunks *= 2
    columns = layer.kernel[0] * layer.kernel[1] * layer.channels
    return Norm(height, width, columns, lane_size, chunks, 0.0, 0.0, relu=False)


def matrix_weight_grad(
    layer: Depthwise, sums: Norm, g: Tensor, x: Tensor, parts: Tensor, out: Tensor
) -> None:
    """Write each lane's gradient of the filters [L, KH · KW · C]; `parts` has room for sums of chunks."""
    taps = [triton.next_power_of_2(taps) for taps in layer.kernel]
    grid = len(out) * sums.chunks, triton.cdiv(layer.channels, _CHANNELS)
    _deep_matrix_grad[grid](
        g, x, parts, 0, R=sums.rows, CHUNKS=sums.chunks, **layer.constants, BA=taps[0], BB=taps[1],
        BR=_ROWS, BC=_CHANNELS, num_warps=8 if taps[0] * taps[1] > 32 else 4, enable_fp_fusion=False,
    )  # fmt: skip
    join_parts(sums, (parts, None), sums.chunks, (out, None))


@triton.jit
def _deep_matrix_grad(
    g, x, parts, zero, R: tl.constexpr, CHUNKS: tl.constexpr,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr,
    PW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr, BA: tl.constexpr, BB: tl.constexpr,
    BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """A chunk's Σ g · x for all taps: BA ≥ KH rows of them by BB ≥ KW columns."""
    SIZE: tl.constexpr = (R + CHUNKS - 1) // CHUNKS
    part, c0 = tl.program_id(0), tl.program_id(1) * BC
    first, count = chunk_rows(part, R, CHUNKS)
    b, cx = tl.arange(0, BB * BC) // BC, c0 + tl.arange(0, BB * BC) % BC
    a, cg = tl.arange(0, BA * BC) // BC, c0 + tl.arange(0, BA * BC) % BC
    value = tl.zeros((BA * BC, BB * BC), tl.float32)
    for start in range(0, SIZE, BR):
        r = start + tl.arange(0, BR)
        inside = (r < count)[:, None]
        line, ow = (first + r) // OW, ((first + r) % OW + zero)[:, None]
        n, i = (line // H)[:, None], (line % H + zero)[:, None]
        column = ow * SW - PW + (b * DW)[None, :]
        seen = inside & (column >= 0) & (column < W) & (b < KW)[None, :] & (cx < C)[None, :]
        image = tl.load(x + (line[:, None] * W + column) * C + cx[None, :], mask=seen, other=0.0)
        from_row = i + PH - (a * DH)[None, :]
        row = from_row // SH
        seen = inside & (from_row >= 0) & (row < OH) & (a < KH)[None, :] & (cg < C)[None, :]
        seen = seen & (from_row % SH == 0)
        grad = tl.load(g + ((n * OH + row) * OW + ow) * C + cg[None, :], mask=seen, other=0.0)
        value = tl.dot(tl.trans(grad), image, value)
    each = value.reshape(BA, BC, BB, BC)
    c = tl.arange(0, BC)
    same = c[None, :, None, None] == c[None, None, None, :]
    found = tl.sum(tl.where(same, each, 0.0), 3)
    a3, b3 = tl.arange(0, BA)[:, None, None], tl.arange(0, BB)[None, None, :]
    c3 = (c0 + c)[None, :, None]
    place = (part * (KH * KW) + a3 * KW + b3).to(tl.int64) * C + c3
    tl.store(parts + place, found, mask=(a3 < KH) & (b3 < KW) & (c3 < C))
