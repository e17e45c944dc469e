"""Depthwise convolution in Triton, all lanes in one launch: each channel by a filter of its own.

A program computes some pixels of some channels, tap by tap, without matrix units, and reads what neighbours
read from the first-level cache. A sum runs over the taps of one output, so a sample's bits do not depend on
the batch. The weight gradient is summed over chunks of a lane's pixels, then pairwise; in types of 16 bits
`depthwise_matrix` computes it, unless a filter is too large for that.

Legend: x [N, H, W, C] is the input, y or g [N, OH, OW, C] the output or its gradient, w [KH · KW, C] the
filters; stride (SH, SW), padding (PH, PW), dilation (DH, DW). `zero` is 0, which the compiler does not know,
so that it does not narrow the arithmetic on rows and columns (`compiler_watch.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.triton.norm.norm_forward import Norm, chunk_rows
from lockstep.kernels.triton.norm.norm_gradient import join_parts

_Pair = tuple[int, int]
_PIXELS, _CHANNELS = 32, 64  # of a block
_SUM_VALUES = 1024  # of a block of the weight gradient, for each tap of a row of taps
_PROGRAMS, _FEWEST = 4096, 128  # about how many programs it is cut into; rows of a chunk at least


@dataclass(frozen=True)
class Depthwise:
    """The shapes of one depthwise convolution."""

    image: _Pair
    out: _Pair
    channels: int
    kernel: _Pair
    stride: _Pair
    padding: _Pair
    dilation: _Pair

    @property
    def constants(self) -> dict[str, int]:
        """What the kernels are compiled for."""
        names = "H", "W", "OH", "OW", "KH", "KW", "SH", "SW", "PH", "PW", "DH", "DW"
        pairs = self.image, self.out, self.kernel, self.stride, self.padding, self.dilation
        return {"C": self.channels, **dict(zip(names, (n for pair in pairs for n in pair), strict=True))}


@triton.jit
def _deep_forward(
    x, w, y, total, zero,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr,
    PW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """y = Σ x · w over the taps."""
    q = tl.program_id(0) * BP + tl.arange(0, BP)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    n, pixel = q // (OH * OW), q % (OH * OW) + zero
    top, left = pixel // OW * SH - PH, pixel % OW * SW - PW + zero
    real, inside = c < C, q < total
    value = tl.zeros((BP, BC), tl.float32)
    for a in tl.static_range(KH):
        for b in tl.static_range(KW):
            row, column = top + a * DH, left + b * DW
            seen = inside & (row >= 0) & (row < H) & (column >= 0) & (column < W)
            place = ((n * H + row) * W + column)[:, None] * C + c[None, :]
            weight = tl.load(w + (a * KW + b) * C + c, mask=real, other=0.0).to(tl.float32)
            part = tl.load(x + place, mask=seen[:, None] & real[None, :], other=0.0).to(tl.float32)
            value = tl.fma(part, tl.broadcast_to(weight[None, :], (BP, BC)), value)
    place = q[:, None] * C + c[None, :]
    tl.store(y + place, value.to(y.dtype.element_ty), mask=inside[:, None] & real[None, :])


@triton.jit
def _deep_input_grad(
    g, w, dx, total, zero,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr,
    PW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """dx = Σ g · w over the outputs that read the pixel."""
    q = tl.program_id(0) * BP + tl.arange(0, BP)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    n, pixel = q // (H * W), q % (H * W) + zero
    high, wide = pixel // W + PH, pixel % W + PW + zero
    real, inside = c < C, q < total
    value = tl.zeros((BP, BC), tl.float32)
    for a in tl.static_range(KH):
        for b in tl.static_range(KW):
            from_row, from_column = high - a * DH, wide - b * DW
            row, column = from_row // SH, from_column // SW
            seen = inside & (from_row >= 0) & (row < OH) & (from_column >= 0) & (column < OW)
            seen = seen & (from_row % SH == 0) & (from_column % SW == 0)
            place = ((n * OH + row) * OW + column)[:, None] * C + c[None, :]
            weight = tl.load(w + (a * KW + b) * C + c, mask=real, other=0.0).to(tl.float32)
            part = tl.load(g + place, mask=seen[:, None] & real[None, :], other=0.0).to(tl.float32)
            value = tl.fma(part, tl.broadcast_to(weight[None, :], (BP, BC)), value)
    place = q[:, None] * C + c[None, :]
    tl.store(dx + place, value.to(dx.dtype.element_ty), mask=inside[:, None] & real[None, :])


@triton.jit
def _deep_weight_grad(
    g, x, parts, zero, R: tl.constexpr, CHUNKS: tl.constexpr,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr,
    PW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    """A chunk's Σ g · x for one row of taps: BK ≥ KW taps at once."""
    SIZE: tl.constexpr = (R + CHUNKS - 1) // CHUNKS
    part, a = tl.program_id(0), tl.program_id(2)
    first, count = chunk_rows(part, R, CHUNKS)
    b = tl.arange(0, BK)[:, None]
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    real = c < C
    value = tl.zeros((BK, BR, BC), tl.float32)
    for start in range(0, SIZE, BR):
        r = start + tl.arange(0, BR)
        q = first + r
        inside = r < count
        grad = tl.load(g + q[:, None] * C + c[None, :], mask=inside[:, None] & real[None, :], other=0.0)
        n, pixel = q // (OH * OW), q % (OH * OW) + zero
        row = pixel // OW * SH - PH + a * DH
        column = (pixel % OW * SW - PW + zero)[None, :] + b * DW
        seen = (inside & (row >= 0) & (row < H))[None, :] & (column >= 0) & (column < W) & (b < KW)
        place = (((n * H + row) * W)[None, :] + column)[:, :, None] * C + c[None, None, :]
        image = tl.load(x + place, mask=seen[:, :, None] & real[None, None, :], other=0.0)
        wide = tl.broadcast_to(grad.to(tl.float32)[None, :, :], (BK, BR, BC))
        value = tl.fma(image.to(tl.float32), wide, value)
    taps = a * KW + b
    place = (part * (KH * KW) + taps).to(tl.int64) * C + c[None, :]
    tl.store(parts + place, tl.sum(value, 1), mask=(b < KW) & real[None, :])


def depthwise_forward(layer: Depthwise, x: Tensor, w: Tensor, y: Tensor) -> None:
    """Convolve x with w into y."""
    _launch_pixels(_deep_forward, layer, x, w, y)


def depthwise_input_grad(layer: Depthwise, g: Tensor, w: Tensor, dx: Tensor) -> None:
    """Write the gradient of the input."""
    _launch_pixels(_deep_input_grad, layer, g, w, dx)


def vector_sums(layer: Depthwise, lane_size: int, total_lanes: int) -> Norm:
    """How the weight gradient is summed: rows are a lane's outputs, columns the values of a filter."""
    rows, width = lane_size * layer.out[0] * layer.out[1], triton.cdiv(layer.channels, _CHANNELS)
    chunks, (high, wide) = 1, layer.kernel
    while 2 * chunks * total_lanes * width * high <= _PROGRAMS and 2 * chunks * _FEWEST <= rows:
        chunks *= 2
    return Norm(*layer.out, high * wide * layer.channels, lane_size, chunks, 0.0, 0.0, relu=False)


def vector_weight_grad(
    layer: Depthwise, sums: Norm, g: Tensor, x: Tensor, parts: Tensor, out: Tensor
) -> None:
    """Write each lane's gradient of the filters [L, KH · KW · C]; `parts` has room for sums of chunks."""
    wide, taps = _block(layer.channels), triton.next_power_of_2(layer.kernel[1])
    rows = max(_SUM_VALUES // wide, 4)
    grid = len(out) * sums.chunks, triton.cdiv(layer.channels, wide), layer.kernel[0]
    _deep_weight_grad[grid](
        g, x, parts, 0, R=sums.rows, CHUNKS=sums.chunks, **layer.constants, BK=taps, BR=rows, BC=wide,
        enable_fp_fusion=False,
    )  # fmt: skip
    join_parts(sums, (parts, None), sums.chunks, (out, None))


def _launch_pixels(kernel: Any, layer: Depthwise, source: Tensor, w: Tensor, out: Tensor) -> None:
    total, wide = out.numel() // layer.channels, _block(layer.channels)
    pixels = _PIXELS * _CHANNELS // wide
    grid = triton.cdiv(total, pixels), triton.cdiv(layer.channels, wide)
    kernel[grid](source, w, out, total, 0, **layer.constants, BP=pixels, BC=wide, enable_fp_fusion=False)


def _block(channels: int) -> int:
    """Channels of a block: few blocks, few of whose channels are not there."""
    wide: int = min(triton.next_power_of_2(channels), _CHANNELS)
    while wide > 16 and -(-channels // wide) * wide >= -(-channels // (wide // 2)) * (wide // 2) + wide // 2:
        wide //= 2
    return max(wide, 16)
