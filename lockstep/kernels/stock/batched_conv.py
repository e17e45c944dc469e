"""Convolution for `lower/batched.py`: all lanes in one call on a CPU, weight gradients by lane."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.comm.tree import LaneTree


def batched_conv2d(x: Tensor, layer: nn.Conv2d, lanes: int) -> Tensor:
    """Apply `layer` to x [lanes · n, C, H, W]; the lane tree sums its weight gradients over lanes."""
    result: Tensor = _BatchedConv2d.apply(x, layer.weight, layer.bias, layer, lanes)
    return result


class _BatchedConv2d(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: nn.Conv2d, lanes: int
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer, ctx.lanes, ctx.bias_sizes = layer, lanes, None if bias is None else [len(bias)]
        return F.conv2d(x, weight, bias, layer.stride, layer.padding, layer.dilation, layer.groups)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        x, _ = ctx.saved_tensors
        has_bias = ctx.bias_sizes is not None
        size = len(x) // ctx.lanes
        tree = LaneTree()
        for part, inputs in zip(torch.split(grad, size), torch.split(x, size), strict=True):
            _, by_weight, by_bias = _gradients(ctx, part, inputs, [False, True, has_bias])
            tree.add([by_weight, *([by_bias] if has_bias else [])])
        sums = [*tree.root()[1], None]
        by_input = _gradients(ctx, grad, x, [True, False, False])[0] if ctx.needs_input_grad[0] else None
        return by_input, sums[0], sums[1], None, None


def _gradients(ctx: Any, grad: Tensor, x: Tensor, wanted: list[bool]) -> tuple[Tensor, Tensor, Tensor]:
    layer = ctx.layer
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.convolution_backward(
        grad, x, layer.weight, ctx.bias_sizes, layer.stride, layer.padding, layer.dilation, False, [0, 0],
        layer.groups, wanted,
    )  # fmt: skip
    return found
