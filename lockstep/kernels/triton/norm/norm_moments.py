"""Mean and variance of every lane, from parts: blocks of its rows, joined as pairs.

Legend: as in `norm`. A part is SIZE rows, the last ones fewer or none; a lane has PARTS of them.
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
AllLanes = Callable[[Tensor], Tensor]  # [L, …] of a worker's lanes → [V, …] of all workers'


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
    """A chunk's mean and sum of squared deviations: of every BR-th row first, then of these together."""
    SIZE: tl.constexpr = (R + CHUNKS - 1) // CHUNKS
    part = tl.program_id(1)
    first, count = chunk_rows(part, R, CHUNKS)
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    centre = tl.zeros((BR, BC), tl.float32)
    total = tl.zeros((BR, BC), tl.float32)
    for start in range(0, SIZE, BR):
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
    """Rows 0, 2, 4, … and 1, 3, 5, …"""
    return tl.split(tl.permute(tl.reshape(x, (x.shape[0] // 2, 2, x.shape[1])), (0, 2, 1)))


@triton.jit
def part_places(lane, group, c, C: tl.constexpr, PARTS: tl.constexpr, BP: tl.constexpr):
    """Numbers of the parts in a group of BP, where they lie, and which of them there are."""
    number = group * BP + tl.arange(0, BP)
    place = (lane.to(tl.int64) * PARTS + number)[:, None] * C + c[None, :]  # the table may be large
    return number, place, (number < PARTS)[:, None] & (c < C)[None, :]


@triton.jit
def _joined(
    mean, square, lane, group, c,
    R: tl.constexpr, C: tl.constexpr, SIZE: tl.constexpr, PARTS: tl.constexpr,
    BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """BP parts of a lane as pairs."""
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
    """Every BP parts of a lane to one."""
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
    """All parts to a lane's mean and rate, what they make of z, and the lane's running statistics.

    If SHARED, the parts are of all lanes together.
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
    """Buffers of one norm: two values of each part, [L · part_rows, C]; [L, C] a lane."""

    first_parts: Tensor
    second_parts: Tensor
    mean: Tensor
    rate: Tensor
    factor: Tensor
    shift: Tensor


def exchange(all_lanes: AllLanes, first: Tensor, second: Tensor) -> Tensor:
    """Two tables [L, C] of this worker's lanes → both [V, C] of all lanes, by one exchange."""
    return all_lanes(torch.stack([first, second], 1)).transpose(0, 1).contiguous()


def find_moments(norm: Norm, z: Tensor, stats: Statistics) -> None:
    """Each chunk's mean and squared deviations of z [N, H, W, C]."""
    grid = triton.cdiv(norm.channels, norm.block), len(stats.mean) * norm.chunks
    _moments[grid](
        z, stats.first_parts, stats.second_parts,
        R=norm.rows, C=norm.channels, CHUNKS=norm.chunks, BR=ROWS, BC=norm.block, enable_fp_fusion=False,
    )  # fmt: skip


def statistics(
    norm: Norm, box: int, gamma: Tensor, beta: Tensor, running: tuple[Tensor, Tensor],
    out: tuple[Tensor, Tensor], stats: Statistics, all_lanes: AllLanes | None = None,
) -> None:  # fmt: skip
    """Each lane's mean and rate from boxes of so many rows, if any, else from chunks.

    `out`, columns of a table, gets its running ones. With `all_lanes` all are those of all lanes of the step
    together, the same for each.
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
