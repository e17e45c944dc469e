"""Depthwise convolution as custom ops of the `compiled` set, by our own kernels: all lanes in one launch.

Shapes: as in `custom_op`; w [C, 1, KH, KW].
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from lockstep.kernels.stock.custom_op import lying, sum_by_tree
from lockstep.kernels.triton.conv.depthwise import (
    Depthwise,
    depthwise_forward,
    depthwise_input_grad,
    vector_sums,
    vector_weight_grad,
)
from lockstep.kernels.triton.conv.depthwise_matrix import matrix_sums, matrix_weight_grad, takes_matrix

_LAST = torch.channels_last


@torch.library.custom_op("lockstep::depthwise", mutates_args=())
def depthwise(x: Tensor, w: Tensor, stride: list[int], padding: list[int], dilation: list[int]) -> Tensor:
    """The convolution of every channel with its own filter, without bias."""
    layer = _layer(x, w, stride, padding, dilation)
    y = x.new_empty(len(x), *layer.out, layer.channels)
    depthwise_forward(layer, lying(x), _filters(w), y)
    return y.permute(0, 3, 1, 2)


@torch.library.custom_op("lockstep::depthwise_data_grad", mutates_args=())
def depthwise_data_grad(
    g: Tensor, x: Tensor, w: Tensor, stride: list[int], padding: list[int], dilation: list[int]
) -> Tensor:
    """The gradient of the input of `depthwise`; of x only its shape is read."""
    layer = _layer(x, w, stride, padding, dilation)
    dx = g.new_empty(len(x), *layer.image, layer.channels)
    depthwise_input_grad(layer, lying(g), _filters(w), dx)
    return dx.permute(0, 3, 1, 2)


@torch.library.custom_op("lockstep::depthwise_filter_grad", mutates_args=())
def depthwise_filter_grad(
    g: Tensor, x: Tensor, w: Tensor, stride: list[int], padding: list[int], dilation: list[int],
    lane_size: int, total_lanes: int,
) -> Tensor:  # fmt: skip
    """The gradient of the filters of `depthwise` in fp32, summed by the lane tree."""
    layer, lanes = _layer(x, w, stride, padding, dilation), len(x) // lane_size
    by_matrix = takes_matrix(layer, x.dtype)
    sums = (matrix_sums if by_matrix else vector_sums)(layer, lane_size, total_lanes)
    weight_grad = matrix_weight_grad if by_matrix else vector_weight_grad
    parts = torch.empty(lanes * sums.part_rows(), sums.channels, device=x.device)
    each = torch.empty(lanes, sums.channels, device=x.device)
    weight_grad(layer, sums, lying(g), lying(x), parts, each)
    found = sum_by_tree(each).view(*layer.kernel, layer.channels)
    return found.permute(2, 0, 1)[:, None].contiguous(memory_format=_LAST)


def _filters(w: Tensor) -> Tensor:
    """[C, 1, KH, KW] → [KH · KW, C]."""
    return w.flatten(1).t().contiguous()


def _layer(x: Tensor, w: Tensor, stride: list[int], padding: list[int], dilation: list[int]) -> Depthwise:
    pairs = [(stride[0], stride[1]), (padding[0], padding[1]), (dilation[0], dilation[1])]
    image, kernel = (x.shape[2], x.shape[3]), (w.shape[2], w.shape[3])
    high, wide = (
        (size + 2 * pad - step * (taps - 1) - 1) // by + 1
        for size, taps, by, pad, step in zip(image, kernel, *pairs, strict=True)
    )
    return Depthwise(image, (high, wide), x.shape[1], kernel, *pairs)


depthwise.register_fake(
    lambda x, w, stride, padding, dilation: torch.empty_like(
        F.conv2d(x, w, None, stride, padding, dilation, len(w)), memory_format=_LAST
    )
)
depthwise_data_grad.register_fake(lambda g, x, *_: torch.empty_like(x, dtype=g.dtype, memory_format=_LAST))
depthwise_filter_grad.register_fake(
    lambda g, x, w, *_: torch.empty_like(w, dtype=torch.float32, memory_format=_LAST)
)
