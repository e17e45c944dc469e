"""Batch norm of all lanes, backward pass: gradients of gamma and beta by lane, and of the norm's input.

Legend: as in `norm_forward`; x̂ is z normalized: (z − mean) · rate.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.triton.lane_tree_sum import lane_tree_sum
from lockstep.kernels.triton.norm.norm_forward import (
    JOINED,
    ROWS,
    Norm,
    border_of,
    chunk_rows,
    image_place,
    lane_rows,
)
from lockstep.kernels.triton.norm.norm_moments import (
    COLS,
    AllLanes,
    Statistics,
    exchange,
    halves,
    part_places,
)

_Pair = tuple[Tensor, Tensor]
_Tables = tuple[Tensor, Tensor | None]


@triton.jit
def _before(grad, x, ACT: tl.constexpr):
    """The gradient of an activation's input x."""
    if ACT == "relu":
        grad = tl.where(x > 0, grad, 0.0)
    elif ACT == "silu":
        part = tl.sigmoid(x)
        grad = grad * (part * (1.0 + x * (1.0 - part)))
    elif ACT == "hardswish":
        grad = tl.where(x <= -3.0, 0.0, tl.where(x < 3.0, grad * (x * (1.0 / 3.0) + 0.5), grad))
    return grad


@triton.jit
def _sums(
    g, z, lane_mean, rate, factor, shift, by_gamma, by_beta,
    R: tl.constexpr, C: tl.constexpr, CHUNKS: tl.constexpr, HAS_Z: tl.constexpr, ACT: tl.constexpr,
    BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """A chunk's Σ g, and with HAS_Z its Σ g · x̂; with ACT, of the gradient before that activation."""
    SIZE: tl.constexpr = (R + CHUNKS - 1) // CHUNKS
    part = tl.program_id(0)
    first, count = chunk_rows(part, R, CHUNKS)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    gamma = tl.zeros((BR, BC), tl.float32)  # summed over rows once, at the end, since that needs a barrier
    beta = tl.zeros((BR, BC), tl.float32)
    own = part // CHUNKS * C + c
    if HAS_Z:
        centre = tl.load(lane_mean + own, mask=c < C, other=0.0)
        inverse = tl.load(rate + own, mask=c < C, other=0.0)
    if ACT != "":
        scale = tl.load(factor + own, mask=c < C, other=0.0)
        offset = tl.load(shift + own, mask=c < C, other=0.0)
    for start in tl.range(0, SIZE, BR, num_stages=3):  # the next blocks are on their way
        row = start + tl.arange(0, BR)
        real = (row < count)[:, None] & (c < C)[None, :]
        place = (first + row)[:, None] * C + c[None, :]
        grad = tl.load(g + place, mask=real, other=0.0).to(tl.float32)
        if HAS_Z:
            x = tl.load(z + place, mask=real, other=0.0).to(tl.float32)
            if ACT != "":
                grad = _before(grad, x * scale[None, :] + offset[None, :], ACT)
            gamma += grad * ((x - centre[None, :]) * inverse[None, :])
        beta += grad
    tl.store(by_beta + part * C + c, tl.sum(beta, 0), mask=c < C)
    if HAS_Z:
        tl.store(by_gamma + part * C + c, tl.sum(gamma, 0), mask=c < C)


@triton.jit
def _total(parts, place, real, BC: tl.constexpr):
    """Sum rows pairwise."""
    value = tl.load(parts + place, mask=real, other=0.0)
    for _ in tl.static_range(16):
        if value.shape[0] > 1:
            left, right = halves(value)
            value = left + right
    return tl.reshape(value, (BC,))


@triton.jit
def _totals(
    first, second, out_first, out_second, row,
    C: tl.constexpr, PARTS: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Sum each group of BP parts of a lane pairwise, in one table or two: [L · PARTS, C] → rows of out."""
    lane, group = tl.program_id(1), tl.program_id(2)
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    _, place, real = part_places(lane, group, c, C, PARTS, BP)
    own = (lane * tl.num_programs(2) + group).to(tl.int64) * row + c
    tl.store(out_first + own, _total(first, place, real, BC), mask=c < C)
    if second is not None:
        tl.store(out_second + own, _total(second, place, real, BC), mask=c < C)


@triton.jit
def _dz(
    g, z, lane_mean, rate, factor, by_gamma, by_beta, dz, total, row,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr, R: tl.constexpr,
    COUNT: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """dz = factor · (g − mean(g) − x̂ · mean(g · x̂)), with means over COUNT rows."""
    q = tl.program_id(0) * BR + tl.arange(0, BR)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    mask = (q < total)[:, None] & (c < C)[None, :]
    grad = tl.load(g + q[:, None] * C + c[None, :], mask=mask, other=0.0).to(tl.float32)
    x = tl.load(z + q[:, None] * C + c[None, :], mask=mask, other=0.0).to(tl.float32)
    lane = lane_rows(q, total, R, BR)
    own, real = lane * C + c[None, :], (c < C)[None, :]
    centre = tl.load(lane_mean + own, mask=real, other=0.0)
    x = (x - centre) * tl.load(rate + own, mask=real, other=0.0)
    part = lane.to(tl.int64) * row + c[None, :]
    mean_gamma = tl.load(by_gamma + part, mask=real, other=0.0) * (1.0 / COUNT)
    mean_beta = tl.load(by_beta + part, mask=real, other=0.0) * (1.0 / COUNT)
    value = tl.load(factor + own, mask=real, other=0.0) * (grad - mean_beta - x * mean_gamma)
    tl.store(dz + image_place(q, c, H, W, C, BH, BW), value.to(dz.dtype.element_ty), mask=mask)


def norm_sums(
    norm: Norm, g: Tensor, z: Tensor, stats: Sequence[Tensor], tables: _Pair, out: _Pair, *, act: str
) -> None:  # fmt: skip
    """Write each lane's Σ g · x̂ and Σ g, for g and z [N, H, W, C], to `out`.

    The two tensors of `out` may be columns of larger tables, with the same row stride. `stats` are each
    lane's mean, rate, factor and shift. With `act`, g is the gradient of that activation's output.
    """
    lanes, width = len(out[0]), triton.cdiv(norm.channels, norm.block)
    _sums[(lanes * norm.chunks, width)](
        g, z, *stats, *tables,
        R=norm.rows, C=norm.channels, CHUNKS=norm.chunks, HAS_Z=True, ACT=act, BR=ROWS, BC=norm.block,
        enable_fp_fusion=False,
    )  # fmt: skip
    join_parts(norm, tables, norm.chunks, out)


def column_sums(norm: Norm, g: Tensor, chunks: Tensor, out: Tensor) -> None:
    """Write each lane's Σ g [L, C], for g [N, H, W, C], in the same order of summation as `norm_sums`."""
    _sums[(len(out) * norm.chunks, triton.cdiv(norm.channels, norm.block))](
        g, *[None] * 6, chunks,
        R=norm.rows, C=norm.channels, CHUNKS=norm.chunks, HAS_Z=False, ACT="", BR=ROWS, BC=norm.block,
        enable_fp_fusion=False,
    )  # fmt: skip
    join_parts(norm, (chunks, None), norm.chunks, (out, None))


def join_parts(norm: Norm, tables: _Tables, parts: int, out: _Tables) -> None:
    """Sum the `parts` parts of each lane, in one table or two, to one row of out [L, C]."""
    lanes = len(out[0])
    while parts > JOINED:
        groups, first, second = triton.cdiv(parts, JOINED), *tables
        rest = first[lanes * parts :], None if second is None else second[lanes * parts :]
        _sum_parts(norm, tables, parts, rest, lanes, groups)
        tables, parts = rest, groups
    _sum_parts(norm, tables, parts, out, lanes, 1)


def _sum_parts(norm: Norm, tables: _Tables, parts: int, out: _Tables, lanes: int, groups: int) -> None:
    _totals[(triton.cdiv(norm.channels, COLS), lanes, groups)](
        *tables, *out, out[0].stride(0), C=norm.channels, PARTS=parts,
        BP=min(triton.next_power_of_2(parts), JOINED), BC=COLS, enable_fp_fusion=False,
    )  # fmt: skip


def norm_grad(
    norm: Norm, g: Tensor, z: Tensor, stats: Statistics, by_gamma: Tensor, by_beta: Tensor, dz: Tensor,
    all_lanes: AllLanes | None = None, parts: int = 0,
) -> None:  # fmt: skip
    """Write each lane's gradients of gamma and beta, columns of a table, and dz inside its border.

    If `parts` is not 0, the tables of `stats` already hold that many partial sums for each lane, and these
    are only joined. With `all_lanes`, dz uses the sums over all lanes of the step.
    """
    total, row, border, count = z.numel() // norm.channels, by_gamma.stride(0), border_of(norm, dz), norm.rows
    assert row == by_beta.stride(0)
    tables, sums = (stats.first_parts, stats.second_parts), (by_gamma, by_beta)
    if parts:
        join_parts(norm, tables, parts, sums)
    else:
        each = stats.mean, stats.rate, stats.factor, stats.shift
        norm_sums(norm, g, z, each, tables, sums, act="")
    if all_lanes:
        every = exchange(all_lanes, by_gamma, by_beta)
        sums, row, count = (_lane_sum(every[0]), _lane_sum(every[1])), 0, count * every.shape[1]
    _dz[(triton.cdiv(total, ROWS), triton.cdiv(norm.channels, norm.block))](
        g, z, stats.mean, stats.rate, stats.factor, *sums, dz, total, row,
        H=norm.height, W=norm.width, C=norm.channels, BH=border[0], BW=border[1], R=norm.rows, COUNT=count,
        BR=ROWS, BC=norm.block, enable_fp_fusion=False,
    )  # fmt: skip


def _lane_sum(every: Tensor) -> Tensor:
    """Sum [V, C] over lanes by the lane tree."""
    out = every.new_empty(every.shape[1])
    lane_tree_sum(every, out)
    return out
