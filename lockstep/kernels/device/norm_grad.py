"""The gradients of a batch norm by lane: of gamma and beta lane by lane, and of what was normalized.

Legend: as in `norm`; g is the gradient of what enters the ReLU, dz that of z.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.device.moments import COLS, AllLanes, Statistics, exchange, halves, part_places
from lockstep.kernels.device.norm import JOINED, ROWS, Norm, border_of, chunk_rows, image_place, lane_rows
from lockstep.kernels.device.tree import tree_sum


@triton.jit
def _sums(
    g, z, lane_mean, rate, by_gamma, by_beta,
    R: tl.constexpr, C: tl.constexpr, CHUNKS: tl.constexpr, HAS_Z: tl.constexpr,
    BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """A chunk's Σ g, and Σ g · x̂ where x̂ is z normalized."""
    SIZE: tl.constexpr = (R + CHUNKS - 1) // CHUNKS
    part = tl.program_id(0)
    first, count = chunk_rows(part, R, CHUNKS)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    gamma = tl.zeros((BC,), tl.float32)
    beta = tl.zeros((BC,), tl.float32)
    if HAS_Z:
        own = part // CHUNKS * C + c
        centre = tl.load(lane_mean + own, mask=c < C, other=0.0)
        inverse = tl.load(rate + own, mask=c < C, other=0.0)
    for start in range(0, SIZE, BR):
        row = start + tl.arange(0, BR)
        real = (row < count)[:, None] & (c < C)[None, :]
        place = (first + row)[:, None] * C + c[None, :]
        grad = tl.load(g + place, mask=real, other=0.0).to(tl.float32)
        beta += tl.sum(grad, 0)
        if HAS_Z:
            x = tl.load(z + place, mask=real, other=0.0).to(tl.float32)
            gamma += tl.sum(grad * ((x - centre[None, :]) * inverse[None, :]), 0)
    tl.store(by_beta + part * C + c, beta, mask=c < C)
    if HAS_Z:
        tl.store(by_gamma + part * C + c, gamma, mask=c < C)


@triton.jit
def _totals(
    parts, out, row, C: tl.constexpr, PARTS: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr
):  # fmt: skip
    """Every BP parts of a lane as pairs: [L · PARTS, C] → rows of out."""
    lane, group = tl.program_id(1), tl.program_id(2)
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    _, place, real = part_places(lane, group, c, C, PARTS, BP)
    value = tl.load(parts + place, mask=real, other=0.0)
    for _ in tl.static_range(16):
        if value.shape[0] > 1:
            left, right = halves(value)
            value = left + right
    own = (lane * tl.num_programs(2) + group).to(tl.int64)
    tl.store(out + own * row + c, tl.reshape(value, (BC,)), mask=c < C)


@triton.jit
def _dz(
    g, z, lane_mean, rate, factor, by_gamma, by_beta, dz, total, row,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr, R: tl.constexpr,
    COUNT: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """dz = factor · (g − mean of g − x̂ · mean of g · x̂); the sums are over COUNT rows."""
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
    norm: Norm, g: Tensor, z: Tensor, mean: Tensor, rate: Tensor, chunks: tuple[Tensor, Tensor],
    out: tuple[Tensor, Tensor],
) -> None:  # fmt: skip
    """g, z [N, H, W, C] → each lane's Σ g · x̂ and Σ g into `out`, columns of tables of one width."""
    lanes, width = len(mean), triton.cdiv(norm.channels, norm.block)
    _sums[(lanes * norm.chunks, width)](
        g, z, mean, rate, *chunks,
        R=norm.rows, C=norm.channels, CHUNKS=norm.chunks, HAS_Z=True, BR=ROWS, BC=norm.block,
        enable_fp_fusion=False,
    )  # fmt: skip
    for parts, total in zip(chunks, out, strict=True):
        _join_chunks(norm, parts, total)


def column_sums(norm: Norm, g: Tensor, chunks: Tensor, out: Tensor) -> None:
    """g [N, H, W, C] → each lane's Σ g [L, C], as `norm_sums` has it."""
    _sums[(len(out) * norm.chunks, triton.cdiv(norm.channels, norm.block))](
        g, None, None, None, None, chunks,
        R=norm.rows, C=norm.channels, CHUNKS=norm.chunks, HAS_Z=False, BR=ROWS, BC=norm.block,
        enable_fp_fusion=False,
    )  # fmt: skip
    _join_chunks(norm, chunks, out)


def _join_chunks(norm: Norm, table: Tensor, out: Tensor) -> None:
    """All chunks of each lane → a row of out [L, C]."""
    lanes, parts = len(out), norm.chunks
    while parts > JOINED:
        groups, rest = triton.cdiv(parts, JOINED), table[lanes * parts :]
        _sum_parts(norm, table, parts, rest[: lanes * groups], groups)
        table, parts = rest, groups
    _sum_parts(norm, table, parts, out, 1)


def _sum_parts(norm: Norm, table: Tensor, parts: int, out: Tensor, groups: int) -> None:
    _totals[(triton.cdiv(norm.channels, COLS), len(out) // groups, groups)](
        table, out, out.stride(0),
        C=norm.channels, PARTS=parts, BP=min(parts, JOINED), BC=COLS, enable_fp_fusion=False,
    )  # fmt: skip


def norm_grad(
    norm: Norm, g: Tensor, z: Tensor, stats: Statistics, by_gamma: Tensor, by_beta: Tensor, dz: Tensor,
    all_lanes: AllLanes | None = None,
) -> None:  # fmt: skip
    """g [N, H, W, C] → the lanes' gradients of gamma and beta, columns of a table, and dz in its border."""
    total, row, border, count = z.numel() // norm.channels, by_gamma.stride(0), border_of(norm, dz), norm.rows
    assert row == by_beta.stride(0)
    chunks = stats.first_parts, stats.second_parts
    norm_sums(norm, g, z, stats.mean, stats.rate, chunks, (by_gamma, by_beta))
    sums = by_gamma, by_beta
    if all_lanes:
        every = exchange(all_lanes, by_gamma, by_beta)
        sums, row, count = (_lane_sum(every[0]), _lane_sum(every[1])), 0, count * every.shape[1]
    _dz[(triton.cdiv(total, ROWS), triton.cdiv(norm.channels, norm.block))](
        g, z, stats.mean, stats.rate, stats.factor, *sums, dz, total, row,
        H=norm.height, W=norm.width, C=norm.channels, BH=border[0], BW=border[1], R=norm.rows, COUNT=count,
        BR=ROWS, BC=norm.block, enable_fp_fusion=False,
    )  # fmt: skip


def _lane_sum(every: Tensor) -> Tensor:
    """[V, C] → [C], in the lane tree."""
    out = every.new_empty(every.shape[1])
    tree_sum(every, out, torch.zeros(1, dtype=torch.int32, device=every.device), 1.0)
    return out
