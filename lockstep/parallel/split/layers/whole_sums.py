"""The gradients of some weights and biases of a convolution over a whole image, by one stock call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.parallel.split.layers.channel_segment import channel_segments
from lockstep.parallel.split.layers.conv_piece import ConvForm
from lockstep.parallel.split.layers.row_buffer import dense_as


def whole_sums(
    form: ConvForm, x: Tensor, dy: Tensor, outs: range, weight_shape: Sequence[int], with_bias: bool
) -> tuple[Tensor, Tensor | None]:
    """What makes `outs`; dy has these channels only. The kernel that sums weights sums biases, too."""
    inputs, outputs = form.group_sizes(weight_shape)
    whole = torch.empty(tuple(weight_shape), dtype=x.dtype, device=x.device)
    weights, biases = [], []
    for one in channel_segments(outs, outputs):
        own = dense_as(dy[:, one.own.start - outs.start : one.own.stop - outs.start], dy)
        near = dense_as(x[:, one.across(inputs)], x)
        like, size = form.part(whole, one, True), [len(one.own)]
        _, weight, bias = torch.ops.aten.convolution_backward(
            own, near, like, size if with_bias else None, *form.numbers(one), [False, True, with_bias]
        )
        weights.append(weight)
        biases.append(bias)
    return torch.cat(weights, int(form.transposed)), torch.cat(biases) if with_bias else None
