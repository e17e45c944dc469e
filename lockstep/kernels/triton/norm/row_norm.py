"""Layer norm of all lanes in Triton: statistics of each row, and the sums that its gradient needs.

A row is a pixel's channels or a sample's features, and is summed by itself, so its bits do not depend on how
many there are. Sums over rows are cut into chunks of a lane, as in `norm_forward`.

Legend: x [rows, C] is the input, g the gradient of the output, γ the norm's weight; x̂ is x normalized.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.triton.norm.norm_forward import ROWS, Norm, chunk_rows
from lockstep.kernels.triton.norm.norm_gradient import join_parts

_VALUES = 4096  # of a block


@triton.jit
def _row_moments(
    x, mean, rate, total, C: tl.constexpr, EPS: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr
):  # fmt: skip
    """A row's mean, and 1 / its standard deviation."""
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    c = tl.arange(0, BC)
    real = (row < total)[:, None] & (c < C)[None, :]
    value = tl.load(x + row[:, None] * C + c[None, :], mask=real, other=0.0).to(tl.float32)
    centre = tl.sum(value, 1) * (1.0 / C)
    away = tl.where(real, value - centre[:, None], 0.0)
    variance = tl.sum(away * away, 1) * (1.0 / C)
    inverse = tl.div_rn(tl.full((BR,), 1.0, tl.float32), tl.sqrt_rn(variance + EPS))
    tl.store(mean + row, centre, mask=row < total)
    tl.store(rate + row, inverse, mask=row < total)


@triton.jit
def _row_sums(
    g, x, mean, rate, gamma, by_normal, by_one, by_gamma, by_beta,
    R: tl.constexpr, C: tl.constexpr, CHUNKS: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Each row's Σ g · γ · x̂ and Σ g · γ; a chunk's Σ g · x̂ and Σ g for every channel."""
    SIZE: tl.constexpr = (R + CHUNKS - 1) // CHUNKS
    part = tl.program_id(0)
    first, count = chunk_rows(part, R, CHUNKS)
    c = tl.arange(0, BC)
    weight = tl.load(gamma + c, mask=c < C, other=0.0)
    scale = tl.zeros((BR, BC), tl.float32)
    shift = tl.zeros((BR, BC), tl.float32)
    for start in range(0, SIZE, BR):
        row = start + tl.arange(0, BR)
        inside = row < count
        real = inside[:, None] & (c < C)[None, :]
        place = (first + row)[:, None] * C + c[None, :]
        grad = tl.load(g + place, mask=real, other=0.0).to(tl.float32)
        value = tl.load(x + place, mask=real, other=0.0).to(tl.float32)
        centre = tl.load(mean + first + row, mask=inside, other=0.0)
        inverse = tl.load(rate + first + row, mask=inside, other=0.0)
        normal = (value - centre[:, None]) * inverse[:, None]
        through = grad * weight[None, :]
        tl.store(by_normal + first + row, tl.sum(through * normal, 1), mask=inside)
        tl.store(by_one + first + row, tl.sum(through, 1), mask=inside)
        scale += grad * normal
        shift += grad
    tl.store(by_gamma + part * C + c, tl.sum(scale, 0), mask=c < C)
    tl.store(by_beta + part * C + c, tl.sum(shift, 0), mask=c < C)


@triton.jit
def _products(
    a, b, out, R: tl.constexpr, C: tl.constexpr, CHUNKS: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr
):  # fmt: skip
    """A chunk's Σ a · b for every channel."""
    SIZE: tl.constexpr = (R + CHUNKS - 1) // CHUNKS
    part = tl.program_id(0)
    first, count = chunk_rows(part, R, CHUNKS)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    total = tl.zeros((BR, BC), tl.float32)
    for start in tl.range(0, SIZE, BR, num_stages=3):  # the next blocks are on their way
        row = start + tl.arange(0, BR)
        real = (row < count)[:, None] & (c < C)[None, :]
        place = (first + row)[:, None] * C + c[None, :]
        left = tl.load(a + place, mask=real, other=0.0).to(tl.float32)
        total += left * tl.load(b + place, mask=real, other=0.0).to(tl.float32)
    tl.store(out + part * C + c, tl.sum(total, 0), mask=c < C)


def row_moments(x: Tensor, eps: float, mean: Tensor, rate: Tensor) -> None:
    """Write the mean and the rate of each row of x [rows, C]."""
    (total, channels), (rows, block) = x.shape, _block(x.shape[1])
    _row_moments[(triton.cdiv(total, rows),)](
        x, mean, rate, total, C=channels, EPS=eps, BR=rows, BC=block, enable_fp_fusion=False
    )


def row_norm_sums(
    norm: Norm, g: Tensor, x: Tensor, stats: Tensor, gamma: Tensor, rows: Tensor,
    tables: tuple[Tensor, Tensor], out: tuple[Tensor, Tensor],
) -> None:  # fmt: skip
    """Write each row's Σ g · γ · x̂ and Σ g · γ to `rows` [2, rows], each lane's Σ g · x̂ and Σ g to `out`.

    g and x are [rows, C], `stats` [2, rows] their means and rates.
    """
    height, block = _block(norm.channels)
    _row_sums[(len(out[0]) * norm.chunks,)](
        g, x, stats[0], stats[1], gamma, rows[0], rows[1], *tables,
        R=norm.rows, C=norm.channels, CHUNKS=norm.chunks, BR=height, BC=block, enable_fp_fusion=False,
    )  # fmt: skip
    join_parts(norm, tables, norm.chunks, out)


def product_sums(norm: Norm, a: Tensor, b: Tensor, chunks: Tensor, out: Tensor) -> None:
    """Write each lane's Σ a · b [L, C], for a and b [N, H, W, C]."""
    _products[(len(out) * norm.chunks, triton.cdiv(norm.channels, norm.block))](
        a, b, chunks,
        R=norm.rows, C=norm.channels, CHUNKS=norm.chunks, BR=ROWS, BC=norm.block, enable_fp_fusion=False,
    )  # fmt: skip
    join_parts(norm, (chunks, None), norm.chunks, (out, None))


def _block(channels: int) -> tuple[int, int]:
    """Rows and channels of a block that has all channels."""
    wide = triton.next_power_of_2(channels)
    return max(1, min(_VALUES // wide, 64)), wide
