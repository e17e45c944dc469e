"""Autograd functions over lanes for the `compiled` set: convolution, linear, batch norm; by `custom_op.py`.

Gradients of parameters are summed over lanes by the lane tree. Products and sums are custom ops. The rest is
pointwise and left to torch's compiler, which may fuse it freely.

Shapes: as in `custom_op`.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from lockstep.kernels.activation import activate, activate_back
from lockstep.kernels.lrn import in_type_of, widen
from lockstep.kernels.stock.custom_op import (
    conv_data_grad,
    conv_forward,
    conv_weight_grad,
    lane_norm_sums,
    lane_statistics,
    lane_sums,
    over_lanes,
    product,
    product_weight_grad,
    stem_forward,
    stem_weight_grad,
)
from lockstep.kernels.stock.depthwise_op import depthwise, depthwise_data_grad, depthwise_filter_grad

_Pair = tuple[int, int]
_Tensors = tuple[Tensor, Tensor]


class Conv(NamedTuple):
    """How a convolution runs: lane by lane, or all lanes at once where the bits are known to be the same."""

    stride: _Pair
    padding: _Pair
    dilation: _Pair
    groups: int
    lane_size: int
    total_lanes: int
    forward_at_once: bool = False
    gradient_at_once: bool = False
    own: bool = False  # uses our own kernels; the first convolution not for the gradient of the input


def lane_conv2d(x: Tensor, weight: Tensor, bias: Tensor | None, conv: Conv, place: int = 0) -> Tensor:
    """Convolve x in its own type; gradients of weight and bias are fp32 and summed over lanes.

    `place` is the number of this worker's part of the products, or 0 (see `product_cut`).
    """
    y: Tensor = _Conv.apply(x, weight, x.requires_grad, place, *conv)
    return y if bias is None else _Bias.apply(y, bias, conv.lane_size, conv.total_lanes)


def lane_conv_transpose2d(
    x: Tensor, weight: Tensor, bias: Tensor | None, conv: Conv, shape: tuple[int, int]
) -> Tensor:
    """A transposed convolution to images of `shape`: lane by lane, what the gradient of `conv` computes."""
    y: Tensor = _Transposed.apply(x, weight, x.requires_grad, shape, *conv)
    return y if bias is None else _Bias.apply(y, bias, conv.lane_size, conv.total_lanes)


def lane_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, lane_size: int, total_lanes: int, place: int = 0
) -> Tensor:
    """Apply a fully connected layer to x [L · n, features], lane by lane; `place` as in `lane_conv2d`."""
    y: Tensor = _Linear.apply(x, weight, x.requires_grad, place, lane_size)
    return y if bias is None else _Bias.apply(y, bias, lane_size, total_lanes)


def lane_norm(
    x: Tensor, gamma: Tensor, beta: Tensor, running: _Tensors, norm: tuple[int, int, float, float, str]
) -> _Tensors:
    """Batch norm with each lane's own statistics; also the running mean and variance, summed over lanes.

    `norm` is (samples of a lane, lanes of the run, eps, momentum, the activation that follows).
    """
    return cast(_Tensors, _Norm.apply(x, gamma, beta, *running, *norm))


def pixel_mean(x: Tensor) -> Tensor:
    """The mean over pixels, [N, C, H, W] → [N, C], each sample by itself."""
    return cast(Tensor, _PixelMean.apply(x))


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, has_input_grad: bool, place: int, *options: Any
    ) -> Tensor:
        conv, w = Conv(*options), in_type_of(x, weight)
        ctx.conv, ctx.has_input_grad, ctx.place, ctx.shape = conv, has_input_grad, place, x.shape
        is_stem = conv.own and conv.groups == 1
        x = _bordered(x, conv.padding) if is_stem else x
        ctx.save_for_backward(x, weight)  # not its copy in another type, which would stay in memory
        if is_stem:
            return cast(Tensor, stem_forward(x, _stem_filters(w), conv.stride, conv.padding))
        if conv.own:
            return cast(Tensor, depthwise(x, w, *conv[:3]))
        return cast(Tensor, conv_forward(x, w, *conv[:5], conv.forward_at_once, place))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (g,), (x, weight), conv, place = grads, ctx.saved_tensors, ctx.conv, ctx.place
        w, sizes = in_type_of(x, weight), (conv.lane_size, conv.total_lanes)
        if conv.own and conv.groups > 1:
            by_x = depthwise_data_grad(g, x, w, *conv[:3]) if ctx.has_input_grad else None
            by_filter = depthwise_filter_grad(g, x, w, *conv[:3], *sizes)
            return by_x, by_filter, None, None, *[None] * len(conv)
        if conv.own:
            by_weight: Tensor = stem_weight_grad(g, x, w, conv.stride, conv.padding, *sizes)
        else:
            by_weight = conv_weight_grad(g, x, w, *conv[:5], place)
        by_input = None
        is_row = ctx.shape[2:] == w.shape[2:] == (1, 1) and conv.padding == (0, 0)
        if ctx.has_input_grad and conv.own and is_row:
            back = _bordered(g, (0, 0)), _stem_filters(w.transpose(0, 1))
            by_input = stem_forward(*back, conv.stride, (0, 0))
        elif ctx.has_input_grad:
            x = _without_border(x, ctx.shape, conv.padding) if conv.own else x
            by_input = conv_data_grad(g, x, w, *conv[:5], conv.gradient_at_once, place)
        return by_input, by_weight, None, None, *[None] * len(conv)


class _Transposed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, has_grad: bool, shape: _Pair, *options: Any) -> Tensor:
        conv, w = Conv(*options), in_type_of(x, weight)
        ctx.save_for_backward(x, weight)
        ctx.conv, ctx.has_input_grad = conv, has_grad
        like = x.new_empty(len(x), w.shape[1] * conv.groups, *shape)
        y: Tensor = conv_data_grad(x, like, w, *conv[:5], at_once=False)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (g,), (x, weight), conv = grads, ctx.saved_tensors, ctx.conv
        by_weight: Tensor = conv_weight_grad(x, g, in_type_of(x, weight), *conv[:5])
        by_input = None
        if ctx.has_input_grad:
            by_input = conv_forward(g, in_type_of(x, weight), *conv[:5], at_once=False)
        return by_input, by_weight, None, None, *[None] * len(conv)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, has_input_grad: bool, place: int, lane_size: int
    ) -> Tensor:
        w = in_type_of(x, weight)
        ctx.save_for_backward(x, weight)
        ctx.lane_size, ctx.has_input_grad, ctx.place = lane_size, has_input_grad, place
        y: Tensor = product(x, w, lane_size, True, place)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (g,), (x, weight), lane_size, place = grads, ctx.saved_tensors, ctx.lane_size, ctx.place
        by_weight: Tensor = product_weight_grad(g, x, lane_size, place)
        by_input = None
        if ctx.has_input_grad:
            by_input = product(g, in_type_of(x, weight), lane_size, False, place)
        return by_input, by_weight, None, None, None


class _Bias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, lane_size: int, total_lanes: int) -> Tensor:
        ctx.sizes = lane_size, total_lanes
        b = in_type_of(x, bias)
        return x + (b if x.dim() == 2 else b[:, None, None])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (g,) = grads
        image = g if g.dim() == 4 else g[:, :, None, None]
        return g, over_lanes(lane_sums(image, *ctx.sizes)), None, None


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gamma: Tensor, beta: Tensor, mean: Tensor, var: Tensor, lane_size: int,
        total_lanes: int, eps: float, momentum: float, act: str,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        ctx.sizes = lane_size, total_lanes, act
        stats, each = lane_statistics(x, gamma, beta, mean, var, lane_size, total_lanes, eps, momentum)
        news = over_lanes(each)
        ctx.save_for_backward(x, stats)
        ctx.mark_non_differentiable(news)
        _, _, factor, shift = (_wide(values, lane_size) for values in stats)
        return in_type_of(x, activate(act, widen(x) * factor + shift)), news

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        g, (x, stats), (lane_size, _, act) = grads[0], ctx.saved_tensors, ctx.sizes
        sums = lane_norm_sums(g, x, stats, *ctx.sizes)
        by_gamma, by_beta = over_lanes(sums)
        means = sums * (1.0 / (lane_size * x[0, 0].numel()))
        centre, rate, factor, shift = (_wide(values, lane_size) for values in stats)
        mean_gamma, mean_beta = (_wide(values, lane_size) for values in means.unbind(1))
        normal = (widen(x) - centre) * rate
        through = widen(g)
        if act:  # its input is recomputed from x, which is saved anyway
            through = activate_back(act, widen(x) * factor + shift, through)
        away = through - mean_beta - normal * mean_gamma
        return in_type_of(x, factor * away), by_gamma, by_beta, *[None] * 7


class _PixelMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape, ctx.share = x.shape, 1.0 / (x.shape[2] * x.shape[3])
        return in_type_of(x, lane_sums(x, 1, 1) * ctx.share)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (g,) = grads
        spread: Tensor = (g * ctx.share)[:, :, None, None].expand(ctx.shape)
        return spread.contiguous(memory_format=torch.channels_last)


def _bordered(x: Tensor, padding: _Pair) -> Tensor:
    """N C H W → N H W C with a border of zeros and, for wider loads, a multiple of 4 channels."""
    (high, wide), more, x = padding, -x.shape[1] % 4, x.permute(0, 2, 3, 1)
    return pad(x, (0, more, wide, wide, high, high)).contiguous() if high or wide or more else x


def _without_border(x: Tensor, shape: torch.Size, padding: _Pair) -> Tensor:
    """The images [N, C, H, W] to which `_bordered` gave a border."""
    _, channels, height, width = shape
    (high, wide), inner = padding, x[..., :channels].permute(0, 3, 1, 2)
    return inner[:, :, high : high + height, wide : wide + width]


def _stem_filters(w: Tensor) -> Tensor:
    """CO CI KH KW → KH KW CO CI, with a multiple of 4 channels."""
    more, filters = -w.shape[1] % 4, w.permute(2, 3, 0, 1)
    return (pad(filters, (0, more)) if more else filters).contiguous()


def _wide(values: Tensor, lane_size: int) -> Tensor:
    """Repeat [L, C] for every sample of a lane: [L · n, C, 1, 1]."""
    return values[:, None].expand(-1, lane_size, -1).reshape(-1, values.shape[1], 1, 1)
