"""Batch norm of all lanes, each by its own statistics, with ReLU and a residual: the forward pass.

A lane's rows are cut into chunks; a chunk's mean and squared deviations are found block by block, and chunks
are joined as balanced pairs. So nothing depends on how many lanes there are.

Legend: z is what is normalized, y the result, g the gradient of what enters the ReLU, dz that of z. Rows
are pixels, R of them in a lane; C channels; L lanes. Means and factors are [L, C]. Images lie as N H W C; y
and dz have a border of zeros (BH, BW) for the convolutions that read them.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

_PROGRAMS = 2048  # that a kernel is cut into, about
ROWS, _COLS = 64, 64  # of a block


@dataclass(frozen=True)
class Norm:
    """The shapes of one batch norm, for one lane of so many samples."""

    height: int
    width: int
    channels: int
    lane_size: int
    chunks: int
    eps: float
    momentum: float
    relu: bool

    @property
    def rows(self) -> int:
        """R."""
        return self.lane_size * self.height * self.width

    @property
    def block(self) -> int:
        """Channels of a block."""
        return min(max(1 << (self.channels - 1).bit_length(), 16), _COLS)


def norm_chunks(rows: int, channels: int, total_lanes: int) -> int:
    """Chunks of a lane: a power of two that fills a device, the same for any number of workers."""
    chunks = 1
    while 2 * chunks * total_lanes * triton.cdiv(channels, _COLS) <= _PROGRAMS and 2 * chunks * ROWS <= rows:
        chunks *= 2
    return chunks


@triton.jit
def image_place(q, c, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr):
    """Where pixels q and channels c lie."""
    n, pixel = q // (H * W), q % (H * W)
    row = (n * (H + 2 * BH) + pixel // W + BH) * (W + 2 * BW) + pixel % W + BW
    return row[:, None] * C + c[None, :]


@triton.jit
def chunk_rows(part, R: tl.constexpr, CHUNKS: tl.constexpr):
    """The first row of a chunk among those of all lanes, and how many it has."""
    SIZE: tl.constexpr = (R + CHUNKS - 1) // CHUNKS
    first = part % CHUNKS * SIZE
    return part // CHUNKS * R + first, tl.maximum(tl.minimum(SIZE, R - first), 0)


@triton.jit
def _join(left_count, left_mean, left_square, right_count, right_mean, right_square):
    """Mean and squared deviations of two sets together; the left ones if the right set is empty."""
    count = tl.maximum(left_count + right_count, 1).to(tl.float32)
    share = tl.div_rn(right_count.to(tl.float32), count)
    away = right_mean - left_mean
    return left_mean + away * share, left_square + right_square + away * away * (left_count * share)


@triton.jit
def _moments(
    z, mean, square,
    R: tl.constexpr, C: tl.constexpr, CHUNKS: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """A chunk's mean and sum of squared deviations, block after block."""
    SIZE: tl.constexpr = (R + CHUNKS - 1) // CHUNKS
    part = tl.program_id(1)
    first, count = chunk_rows(part, R, CHUNKS)
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    centre = tl.zeros((BC,), tl.float32)
    total = tl.zeros((BC,), tl.float32)
    for start in range(0, SIZE, BR):
        row = start + tl.arange(0, BR)
        real = (row < count)[:, None] & (c < C)[None, :]
        x = tl.load(z + (first + row)[:, None] * C + c[None, :], mask=real, other=0.0).to(tl.float32)
        here = tl.maximum(tl.minimum(count - start, BR), 0)
        own = tl.div_rn(tl.sum(x, 0), tl.zeros((BC,), tl.float32) + tl.maximum(here, 1))
        away = tl.where(real, x - own[None, :], 0.0)
        seen = tl.zeros((BC,), tl.int32) + start
        centre, total = _join(seen, centre, total, seen * 0 + here, own, tl.sum(away * away, 0))
    place = part * C + c
    tl.store(mean + place, centre, mask=c < C)
    tl.store(square + place, total, mask=c < C)


@triton.jit
def halves(x):
    """Rows 0, 2, 4, … and 1, 3, 5, …"""
    return tl.split(tl.permute(tl.reshape(x, (x.shape[0] // 2, 2, x.shape[1])), (0, 2, 1)))


@triton.jit
def _finish(
    mean, square, gamma, beta, lane_mean, rate, factor, shift, old_mean, old_var, out_mean, out_var, row,
    C: tl.constexpr, R: tl.constexpr, CHUNKS: tl.constexpr, EPS: tl.constexpr, MOMENTUM: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    """Chunks as pairs to a lane's mean and rate, what they make of z, and the lane's running statistics."""
    lane = tl.program_id(1).to(tl.int64)  # the table of parts may be large
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    inside = c < C
    number = tl.arange(0, CHUNKS)
    place = (lane * CHUNKS + number)[:, None] * C + c[None, :]
    centre = tl.load(mean + place, mask=inside[None, :], other=0.0)
    total = tl.load(square + place, mask=inside[None, :], other=0.0)
    SIZE: tl.constexpr = (R + CHUNKS - 1) // CHUNKS
    count = tl.maximum(tl.minimum(SIZE, R - number * SIZE), 0)
    count = tl.broadcast_to(count[:, None], (CHUNKS, BC))
    for _ in tl.static_range(16):
        if centre.shape[0] > 1:
            left_mean, right_mean = halves(centre)
            left_square, right_square = halves(total)
            left_count, right_count = halves(count)
            centre, total = _join(left_count, left_mean, left_square, right_count, right_mean, right_square)
            count = left_count + right_count
    centre = tl.reshape(centre, (BC,))
    number_of_rows = tl.zeros((BC,), tl.float32) + R
    variance = tl.div_rn(tl.reshape(total, (BC,)), number_of_rows)
    inverse = tl.div_rn(tl.full((BC,), 1.0, tl.float32), tl.sqrt_rn(variance + EPS))
    scale = inverse * tl.load(gamma + c, mask=inside, other=0.0)
    own = lane * C + c
    tl.store(lane_mean + own, centre, mask=inside)
    tl.store(rate + own, inverse, mask=inside)
    tl.store(factor + own, scale, mask=inside)
    tl.store(shift + own, tl.load(beta + c, mask=inside, other=0.0) - centre * scale, mask=inside)
    unbiased = variance * (R / max(R - 1, 1))
    before = tl.load(old_mean + c, mask=inside, other=0.0)
    tl.store(out_mean + lane * row + c, before * (1.0 - MOMENTUM) + centre * MOMENTUM, mask=inside)
    before = tl.load(old_var + c, mask=inside, other=0.0)
    tl.store(out_var + lane * row + c, before * (1.0 - MOMENTUM) + unbiased * MOMENTUM, mask=inside)


@triton.jit
def _apply(
    z, factor, shift, residual, y, total,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, RH: tl.constexpr, RW: tl.constexpr,
    BH: tl.constexpr, BW: tl.constexpr, R: tl.constexpr, HAS_RESIDUAL: tl.constexpr, RELU: tl.constexpr,
    BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """y = ReLU(z · factor + shift + residual)."""
    q = tl.program_id(0) * BR + tl.arange(0, BR)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    mask = (q < total)[:, None] & (c < C)[None, :]
    x = tl.load(z + q[:, None] * C + c[None, :], mask=mask, other=0.0).to(tl.float32)
    own = (q // R)[:, None] * C + c[None, :]
    x = x * tl.load(factor + own, mask=mask, other=0.0) + tl.load(shift + own, mask=mask, other=0.0)
    if HAS_RESIDUAL:
        x += tl.load(residual + image_place(q, c, H, W, C, RH, RW), mask=mask, other=0.0).to(tl.float32)
    if RELU:
        x = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(y + image_place(q, c, H, W, C, BH, BW), x.to(y.dtype.element_ty), mask=mask)


@dataclass(frozen=True)
class Statistics:
    """Buffers of one norm: [L · chunks, C] for two values of a chunk, [L, C] a lane."""

    first_parts: Tensor
    second_parts: Tensor
    mean: Tensor
    rate: Tensor
    factor: Tensor
    shift: Tensor


def statistics(
    norm: Norm, z: Tensor, gamma: Tensor, beta: Tensor, running: tuple[Tensor, Tensor],
    out: tuple[Tensor, Tensor], stats: Statistics,
) -> None:  # fmt: skip
    """Each lane's mean and rate of z [N, H, W, C]; `out`, columns of a table, gets its running statistics."""
    lanes, width = len(stats.mean), triton.cdiv(norm.channels, norm.block)
    assert out[0].stride(0) == out[1].stride(0)
    _moments[(width, lanes * norm.chunks)](
        z, stats.first_parts, stats.second_parts,
        R=norm.rows, C=norm.channels, CHUNKS=norm.chunks, BR=ROWS, BC=norm.block, enable_fp_fusion=False,
    )  # fmt: skip
    _finish[(width, lanes)](
        stats.first_parts, stats.second_parts, gamma, beta, stats.mean, stats.rate, stats.factor, stats.shift,
        *running, *out, out[0].stride(0),
        C=norm.channels, R=norm.rows, CHUNKS=norm.chunks, EPS=norm.eps, MOMENTUM=norm.momentum, BC=norm.block,
        enable_fp_fusion=False,
    )  # fmt: skip


def apply(
    norm: Norm, z: Tensor, factor: Tensor, shift: Tensor, y: Tensor, residual: Tensor | None, rows: int
) -> None:
    """y [N, H + 2 BH, W + 2 BW, C] of z and perhaps a residual; `rows` of z share a row of the factors."""
    total = z.numel() // norm.channels
    border, theirs = border_of(norm, y), border_of(norm, y if residual is None else residual)
    _apply[(triton.cdiv(total, ROWS), triton.cdiv(norm.channels, norm.block))](
        z, factor, shift, residual, y, total,
        H=norm.height, W=norm.width, C=norm.channels, RH=theirs[0], RW=theirs[1], BH=border[0], BW=border[1],
        R=rows, HAS_RESIDUAL=residual is not None, RELU=norm.relu, BR=ROWS, BC=norm.block,
        enable_fp_fusion=False,
    )  # fmt: skip


def border_of(norm: Norm, image: Tensor) -> tuple[int, int]:
    return (image.shape[1] - norm.height) // 2, (image.shape[2] - norm.width) // 2
