"""Softmax cross-entropy of all lanes: each sample's loss, whether it was right, and the logits' gradient."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_ROWS, _VALUES = 32, 8192  # of a block, at most


@triton.jit
def _cross_entropy(
    logits, labels, weights, loss, right, grad, total, inverse, scale,
    C: tl.constexpr, CP: tl.constexpr, SMOOTHING: tl.constexpr, WEIGHTED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, CP)
    real, known = row < total, col < C
    mask = real[:, None] & known[None, :]
    z = tl.load(logits + row[:, None] * C + col[None, :], mask=mask, other=float("-inf"))
    z = tl.where(real[:, None], z, 0.0)
    label = tl.load(labels + row, mask=real, other=0)
    top = tl.max(z, 1)
    first = tl.min(tl.where(z == top[:, None], col[None, :], CP), 1)
    e = tl.exp(z - top[:, None])
    total_e = tl.sum(e, 1)
    log_p = tl.where(known[None, :], z - top[:, None] - tl.log(total_e)[:, None], 0.0)
    hit = col[None, :] == label[:, None]
    share = tl.where(hit, 1.0 - SMOOTHING, 0.0) + SMOOTHING / C
    value = tl.sum(-share * log_p, 1)
    g = (e / total_e[:, None] - share) * inverse
    if WEIGHTED:
        weight = tl.load(weights + label, mask=real, other=0.0)
        value, g = value * weight, g * weight[:, None]
    tl.store(loss + row, value, mask=real)
    tl.store(right + row, (first == label).to(tl.float32), mask=real)
    if scale is not None:
        g = g * tl.load(scale)
    tl.store(grad + row[:, None] * C + col[None, :], g.to(grad.dtype.element_ty), mask=mask)


@triton.jit
def _lane_means(loss, right, out_loss, out_right, row, LANE: tl.constexpr, BLOCK: tl.constexpr):
    lane = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.float32)
    hits = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, LANE, BLOCK):
        i = start + tl.arange(0, BLOCK)
        total += tl.load(loss + lane * LANE + i, mask=i < LANE, other=0.0)
        hits += tl.load(right + lane * LANE + i, mask=i < LANE, other=0.0)
    tl.store(out_loss + lane * row, tl.sum(total) / LANE)
    tl.store(out_right + lane * row, tl.sum(hits))


def cross_entropy(
    logits: Tensor, labels: Tensor, loss: Tensor, right: Tensor, grad: Tensor, lane_size: int,
    smoothing: float = 0.0, scale: Tensor | None = None, weights: Tensor | None = None,
) -> None:  # fmt: skip
    """logits [N, C] in fp32 → loss [N], right [N] (1.0 or 0.0), grad [N, C] of the mean over each lane.

    The gradient is multiplied by the first number of `scale`, if that is given, a sample's loss by the weight
    of its class, if there are `weights` [C].
    """
    total, num_classes = logits.shape
    padded = max(triton.next_power_of_2(num_classes), 2)
    rows = max(min(_ROWS, _VALUES // padded), 1)
    _cross_entropy[(triton.cdiv(total, rows),)](
        logits, labels, logits if weights is None else weights, loss, right, grad, total, 1.0 / lane_size,
        scale, C=num_classes, CP=padded, SMOOTHING=smoothing, WEIGHTED=weights is not None, ROWS=rows,
        enable_fp_fusion=True,
    )  # fmt: skip


def lane_means(loss: Tensor, right: Tensor, out_loss: Tensor, out_right: Tensor) -> None:
    """Each lane's mean loss and number of right answers, into [lanes]."""
    lane_size = len(loss) // len(out_loss)
    block = min(triton.next_power_of_2(lane_size), 1024)
    _lane_means[(len(out_loss),)](
        loss,
        right,
        out_loss,
        out_right,
        out_loss.stride(0),
        LANE=lane_size,
        BLOCK=block,
        enable_fp_fusion=True,
    )
