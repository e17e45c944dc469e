"""Fully connected layer for `lower/batched.py`: all lanes in one call on a CPU, weight gradients by lane."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.comm.tree import LaneTree


def batched_linear(x: Tensor, weight: Tensor, bias: Tensor | None, lanes: int) -> Tensor:
    """x [lanes · n, in] → [lanes · n, out]; the lane tree sums the weight gradients over lanes."""
    result: Tensor = _BatchedLinear.apply(x, weight, bias, lanes)
    return result


class _BatchedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, lanes: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.lanes, ctx.has_bias = lanes, bias is not None
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        size = len(x) // ctx.lanes
        tree = LaneTree()
        for part, inputs in zip(torch.split(grad, size), torch.split(x, size), strict=True):
            tree.add([part.t() @ inputs, *([part.sum(0)] if ctx.has_bias else [])])
        sums = [*tree.root()[1], None]
        return (grad @ weight if ctx.needs_input_grad[0] else None), sums[0], sums[1], None
