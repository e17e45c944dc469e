"""Sums gradients in the order of the lane tree, in one launch: [lanes · chunks, size] → [size].

A gradient's path: backward → lane tree → bucket → … → optimizer. The chunks of a lane are summed pairwise
too, as a subtree below the lane.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _tree_sum(parts, out, size, scale, bad, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.arange(0, ROWS).to(tl.int64)
    value = tl.load(parts + row[:, None] * size + i[None, :], mask=(i < size)[None, :], other=0.0)
    value = value.to(tl.float32)
    for _ in tl.static_range(16):
        if value.shape[0] > 1:
            pairs = tl.permute(tl.reshape(value, (value.shape[0] // 2, 2, BLOCK)), (0, 2, 1))
            left, right = tl.split(pairs)
            value = left + right
    total = tl.reshape(value, (BLOCK,)) * scale
    tl.store(out + i, total, mask=i < size)
    if bad is not None:
        if tl.max(tl.where(tl.abs(total) < float("inf"), 0, 1)) > 0:
            tl.store(bad, 1)


def lane_tree_sum(parts: Tensor, out: Tensor, bad: Tensor | None = None, scale: float = 1.0) -> None:
    """Sum `parts` [rows, size] over a power of two of rows, times `scale`; set `bad` if not finite."""
    rows, size = parts.shape
    block = max(4096 // rows, 32)
    _tree_sum[(triton.cdiv(size, block),)](
        parts, out, size, scale, bad, ROWS=rows, BLOCK=block, enable_fp_fusion=False
    )
