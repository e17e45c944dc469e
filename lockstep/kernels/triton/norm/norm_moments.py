"""Batch norm of all lanes, statistics: each lane's mean and variance, from parts of its rows joined pairwise.

Legend: as in `norm_forward`. A lane has PARTS parts of SIZE rows; its last parts may have fewer rows or none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.triton.norm.norm_forward import JOINED, ROWS, Norm, chunk_rows

COLS = 16  # channels that one program joins
AllLanes = Callable[[Tensor], Tensor]  # gathers [L, …] of a worker's lanes to [V, …] of all lanes


@triton.jit
def _join(left_count, left_mean, left_square, right_count, right_mean, right_square):
    """Mean and squared deviations of the union of two sets; those of the left set if the right is empty."""
    count = tl.maximum(left_count + right_count, 1).to(tl.float32)
    share = tl.div_rn(right_count.to(tl.float32), count)
    away = right_mean - left_mean
    return left_mean + away * share, left_square + right_square + away * away * (left_count * share)


@triton.jit
def _moments(
    z, mean, square,
    R: tl.constexpr, C: tl.constexpr, CHUNKS: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """A chunk's mean and sum of squared deviations: first of every BR-th row, then of these sets joined."""
    SIZE: tl.constexpr = (R + CHUNKS - 1) // CHUNKS
    part = tl.program_id(1)
    first, count = chunk_rows(part, R, CHUNKS)
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    centre = tl.zeros((BR, BC), tl.float32)
    total = tl.zeros((BR, BC), tl.float32)
    for start in tl.range(0, SIZE, BR, num_stages=3):  # the next blocks are on their way
        row = start + tl.arange(0, BR)
        real = (row < count)[:, None] & (c < C)[None, :]
        x = tl.load(z + (first + row)[:, None] * C + c[None, :], mask=real, other=0.0).to(tl.float32)
        away = tl.where(real, x - centre, 0.0)
        centre += away * (1.0 / (start // BR + 1))
        total += away * (x - centre)
    rows = (tl.maximum(count - tl.arange(0, BR) + (BR - 1), 0) // BR).to(tl.float32)[:, None]
    mean_of_all = tl.div_rn(tl.sum(centre * rows, 0), tl.zeros((BC,), tl.float32) + tl.maximum(count, 1))
    away = centre - mean_of_all[None, :]
    place = part * C + c
    tl.store(mean + place, mean_of_all, mask=c < C)
    tl.store(square + place, tl.sum(total + rows * (away * away), 0), mask=c < C)


@triton.jit
def halves(x):
    """The even rows and the odd rows."""
    return tl.split(tl.permute(tl.reshape(x, (x.shape[0] // 2, 2, x.shape[1])), (0, 2, 1)))


@triton.jit
def part_places(lane, group, c, C: tl.constexpr, PARTS: tl.constexpr, BP: tl.constexpr):
    """For a group of BP parts: their numbers, their offsets in the table, and which of them exist."""
    number = group * BP + tl.arange(0, BP)
    place = (lane.to(tl.int64) * PARTS + number)[:, None] * C + c[None, :]  # a large table needs 64 bits
    return number, place, (number < PARTS)[:, None] & (c < C)[None, :]


@triton.jit
def _joined(
    mean, square, lane, group, c,
    R: tl.constexpr, C: tl.constexpr, SIZE: tl.constexpr, PARTS: tl.constexpr,
    BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Join BP parts of a lane pairwise."""
    number, place, real = part_places(lane, group, c, C, PARTS, BP)
    centre = tl.load(mean + place, mask=real, other=0.0)
    total = tl.load(square + place, mask=real, other=0.0)
    count = tl.maximum(tl.minimum(SIZE, R - number * SIZE), 0)
    count = tl.broadcast_to(count[:, None], (BP, BC))
    for _ in tl.static_range(16):
        if centre.shape[0] > 1:
            left_mean, right_mean = halves(centre)
            left_square, right_square = halves(total)
            left_count, right_count = halves(count)
            centre, total = _join(left_count, left_mean, left_square, right_count, right_mean, right_square)
            count = left_count + right_count
    return tl.reshape(centre, (BC,)), tl.reshape(total, (BC,))


@triton.jit
def _join_some(
    mean, square, out_mean, out_square,
    R: tl.constexpr, C: tl.constexpr, SIZE: tl.constexpr, PARTS: tl.constexpr,
    BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Join each group of BP parts of a lane to one part."""
    lane, group = tl.program_id(1), tl.program_id(2)
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    centre, total = _joined(mean, square, lane, group, c, R, C, SIZE, PARTS, BP, BC)
    place = (lane * tl.num_programs(2) + group) * C + c
    tl.store(out_mean + place, centre, mask=c < C)
    tl.store(out_square + place, total, mask=c < C)


@triton.jit
def _finish(
    mean, square, gamma, beta, lane_mean, rate, factor, shift, old_mean, old_var, out_mean, out_var, row,
    C: tl.constexpr, R: tl.constexpr, SIZE: tl.constexpr, PARTS: tl.constexpr,
    EPS: tl.constexpr, MOMENTUM: tl.constexpr, SHARED: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Join all parts to a lane's mean and rate; then find its factor, shift and running statistics.

    With SHARED, every lane uses the parts of all lanes together.
    """
    lane = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    inside = c < C
    source = lane * 0 if SHARED else lane
    centre, total = _joined(mean, square, source, 0, c, R, C, SIZE, PARTS, BP, BC)
    variance = tl.div_rn(total, tl.zeros((BC,), tl.float32) + R)
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


@dataclass(frozen=True)
class Statistics:
    """Buffers of one norm: two tables of parts [L · part_rows, C], then values of each lane [L, C]."""

    first_parts: Tensor
    second_parts: Tensor
    mean: Tensor
    rate: Tensor
    factor: Tensor
    shift: Tensor


def exchange(all_lanes: AllLanes, first: Tensor, second: Tensor) -> Tensor:
    """Gather two tables [L, C] of this worker's lanes to [2, V, C] of all lanes, in one exchange."""
    return all_lanes(torch.stack([first, second], 1)).transpose(0, 1).contiguous()


def find_moments(norm: Norm, z: Tensor, stats: Statistics) -> None:
    """Write each chunk's mean and squared deviations of z [N, H, W, C] to the tables of parts."""
    grid = triton.cdiv(norm.channels, norm.block), len(stats.mean) * norm.chunks
    _moments[grid](
        z, stats.first_parts, stats.second_parts,
        R=norm.rows, C=norm.channels, CHUNKS=norm.chunks, BR=ROWS, BC=norm.block, enable_fp_fusion=False,
    )  # fmt: skip


def statistics(
    norm: Norm, box: int, gamma: Tensor, beta: Tensor, running: tuple[Tensor, Tensor],
    out: tuple[Tensor, Tensor], stats: Statistics, all_lanes: AllLanes | None = None,
) -> None:  # fmt: skip
    """Find each lane's mean, rate, factor and shift from its parts: boxes of `box` rows, or chunks if 0.

    The new running mean and variance are written to `out`, columns of a table. With `all_lanes`, the
    statistics are over all lanes of the step together, the same for each lane.
    """
    lanes, rows, parts = len(stats.mean), norm.rows, norm.rows // box if box else norm.chunks
    size = box or triton.cdiv(rows, parts)  # the last chunks may be empty
    assert out[0].stride(0) == out[1].stride(0)
    given, width = (stats.first_parts, stats.second_parts), triton.cdiv(norm.channels, COLS)
    while parts > (1 if all_lanes else JOINED):
        groups, joined = triton.cdiv(parts, JOINED), (given[0][lanes * parts :], given[1][lanes * parts :])
        _join_some[(width, lanes, groups)](
            *given, *joined, R=rows, C=norm.channels, SIZE=size, PARTS=parts,
            BP=min(triton.next_power_of_2(parts), JOINED), BC=COLS, enable_fp_fusion=False,
        )  # fmt: skip
        given, parts, size = joined, groups, size * JOINED
    if all_lanes:
        first, second = exchange(all_lanes, given[0][:lanes], given[1][:lanes])
        given, parts, size, rows = (first, second), len(first), rows, rows * len(first)
    _finish[(width, lanes)](
        *given, gamma, beta, stats.mean, stats.rate, stats.factor, stats.shift,
        *running, *out, out[0].stride(0), EPS=norm.eps, MOMENTUM=norm.momentum, SHARED=bool(all_lanes),
        R=rows, C=norm.channels, SIZE=size, PARTS=parts, BP=triton.next_power_of_2(parts), BC=COLS,
        enable_fp_fusion=False,
    )  # fmt: skip
