"""The scale of the loss on a GPU, in fp16: whether a step is taken, and what the next one has.

The rule is `spec/rule/loss_scale.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from lockstep.spec.rule.loss_scale import LEAST, MOST


@triton.jit
def _judge(held, bad, scale, LEAST: tl.constexpr):
    overflow, worse = tl.load(held), tl.load(bad)
    if overflow != 0:
        if tl.load(scale) <= LEAST:
            tl.store(bad, 1)
    tl.store(held, overflow | worse)


@triton.jit
def _rescale(
    held, bad, scale, taken, skipped, cursor, results, GROWTH: tl.constexpr, MOST: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    over, count, value = tl.load(held) != 0, tl.load(taken) + 1, tl.load(scale)
    full = (over == 0) & (count >= GROWTH)
    grows = full & (value < MOST)
    if tl.load(bad) == 0:
        tl.store(scale, tl.where(over, value * 0.5, tl.where(grows, value * 2.0, value)))
        inverse = tl.load(scale + 1)
        tl.store(scale + 1, tl.where(over, inverse * 2.0, tl.where(grows, inverse * 0.5, inverse)))
        tl.store(taken, tl.where(over | full, 0, count))
        tl.store(skipped, tl.load(skipped) + over.to(tl.int32))
        tl.store(results + tl.load(cursor) * WIDTH + 2, over.to(tl.float32))


@dataclass(frozen=True)
class ScaleTables:
    """Where the scale of the loss is on the device, and what it hangs on."""

    scale: Tensor  # and its inverse
    taken: Tensor  # steps since it moved, int32
    held: Tensor  # whether the step updates nothing, int32
    growth: int


def judge_step(tables: ScaleTables, bad: Tensor) -> None:
    """Let gradients that are not finite (`held`) be an error if no smaller scale can help; hold bad steps."""
    _judge[(1,)](tables.held, bad, tables.scale, LEAST=LEAST)


def move_scale(tables: ScaleTables, bad: Tensor, skipped: Tensor, cursor: Tensor, results: Tensor) -> None:
    """Find the scale of the next step, count this one if it was skipped, and note that beside its results."""
    _rescale[(1,)](
        tables.held, bad, tables.scale, tables.taken, skipped, cursor, results, GROWTH=tables.growth,
        MOST=MOST, WIDTH=results.shape[1],
    )  # fmt: skip
