"""The passes of a convolution over workers, for autograd: what is gathered, computed and kept, and when."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lockstep.parallel.split.layers.row_buffer import RowParts
from lockstep.parallel.split.layers.split_conv import ConvCut


def convolve(cut: ConvCut, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """This worker's part of a convolution."""
    groups = cut.own_groups
    if groups and {"forward", "input", "weight", "bias"} <= cut.by_channel:
        own = slice(cut.own_outs.start, cut.own_outs.stop)
        cut, weight, bias = cut.of_groups(groups), weight[own], None if bias is None else bias[own]
    found: Tensor = _Convolve.apply(x, weight, bias, cut)  # type: ignore[no-untyped-call]
    return found


class _Convolve(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, cut: ConvCut) -> Tensor:
        every = cut.axes.all_channels(x, cut.given)
        half = [None if whole is None else whole.to(x.dtype) for whole in (weight, bias)]
        assert half[0] is not None
        out, parts = cut.forward(every, half[0], half[1])
        ctx.cut, ctx.ranges = cut, parts.ranges
        # not the rows with their halo in one: the layer before keeps its output anyhow
        ctx.save_for_backward(weight, *parts.tensors)
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        cut: ConvCut = ctx.cut
        weight, *tensors = ctx.saved_tensors
        x, own = RowParts(ctx.ranges, tensors), cut.ranges(cut.out_rows)[0]
        needs_x, *needs_sums, _ = ctx.needs_input_grad
        dy = dy if _is_dense(dy) else dy.contiguous()
        if needs_x or cut.form.transposed or not {"weight", "bias"} <= cut.by_channel:
            dy = cut.axes.all_channels(dy, cut.made)
        sums: list[Tensor | None] = []

        def add_up(near: RowParts) -> None:
            sums[:] = cut.sums(x, near, dy, weight, *needs_sums)

        grad, needs_others = None, cut.form.transposed  # the weight's gradient
        if needs_x:
            meanwhile = None if needs_others else lambda: add_up(RowParts([own], [dy]))
            grad, near = cut.input_gradient(dy, weight.to(dy.dtype), tensors[0].shape[3], meanwhile)
        else:
            near = cut.input_halo.fetch(dy) if needs_others and cut.is_banded else RowParts([own], [dy])
        if not sums:
            add_up(near)
        return grad, sums[0], sums[1], None


def _is_dense(tensor: Tensor) -> bool:
    return tensor.is_contiguous() or (
        tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    )
