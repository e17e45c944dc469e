"""Stock convolutions and products over the samples of several lanes, and batch norm by lane, with gradients.

Stock kernels are called as they are, lane by lane or at once where that is known to be the same; other sums
are kernels of ours that cut them alike for any number of lanes. To torch's compiler all of them are closed
operations: what is left to it is pointwise, and it may fuse that as it likes. Lanes are summed as pairs.

Shapes: x [L · n, C, …], L lanes of n samples, lying channels last; a lane's statistics are [L, C].
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lockstep.kernels.device.norm import Norm, Statistics, norm_chunks, statistics
from lockstep.kernels.device.norm_grad import column_sums, norm_sums
from lockstep.kernels.device.tree import tree_sum
from lockstep.kernels.lrn import in_type_of, widen

_Pair = tuple[int, int]
_Tensors = tuple[Tensor, Tensor]
_LAST = torch.channels_last


class Conv(NamedTuple):
    """How a convolution runs: all lanes at once where a sample's result is known to be the lane's."""

    stride: _Pair
    padding: _Pair
    dilation: _Pair
    groups: int
    lane_size: int
    total_lanes: int
    forward_at_once: bool = False
    gradient_at_once: bool = False


def lane_conv2d(x: Tensor, weight: Tensor, bias: Tensor | None, conv: Conv) -> Tensor:
    """x through a convolution in the type of x; weight and bias get fp32 gradients, summed over lanes."""
    y: Tensor = _Conv.apply(x, weight, x.requires_grad, *conv)
    return y if bias is None else _Bias.apply(y, bias, conv.lane_size, conv.total_lanes)


def lane_linear(x: Tensor, weight: Tensor, bias: Tensor | None, lane_size: int, total_lanes: int) -> Tensor:
    """x [L · n, features] through a fully connected layer, lane by lane."""
    y: Tensor = _Linear.apply(x, weight, x.requires_grad, lane_size)
    return y if bias is None else _Bias.apply(y, bias, lane_size, total_lanes)


def lane_norm(
    x: Tensor, gamma: Tensor, beta: Tensor, running: _Tensors, norm: tuple[int, int, float, float]
) -> tuple[Tensor, Tensor, Tensor]:
    """Batch norm by the statistics of each lane; `norm` is n, all lanes of a run, eps and momentum.

    Gives the running mean and variance too, summed over lanes.
    """
    y, means, variances = _Norm.apply(x, gamma, beta, *running, *norm)
    return y, pair_sum(means), pair_sum(variances)


def pixel_mean(x: Tensor) -> Tensor:
    """[N, C, H, W] → [N, C], each sample by itself."""
    found: Tensor = _PixelMean.apply(x)
    return found


def pair_sum(parts: Tensor) -> Tensor:
    """The sum over a power of two of rows as balanced pairs: the lane tree."""
    rows: list[Tensor] = list(parts)
    while len(rows) > 1:
        rows = [left + right for left, right in zip(rows[::2], rows[1::2], strict=True)]
    return rows[0]


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, has_input_grad: bool, *options: Any) -> Tensor:
        conv, w = Conv(*options), in_type_of(x, weight)
        ctx.save_for_backward(x, w)
        ctx.conv, ctx.has_input_grad = conv, has_input_grad
        y: Tensor = conv_forward(x, w, *conv[:5], conv.forward_at_once)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (g,), (x, w), conv = grads, ctx.saved_tensors, ctx.conv
        by_weight: Tensor = conv_weight_grad(g, x, w, *conv[:5])
        by_input = conv_data_grad(g, x, w, *conv[:5], conv.gradient_at_once) if ctx.has_input_grad else None
        return by_input, by_weight, *[None] * 9


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, has_input_grad: bool, lane_size: int) -> Tensor:
        w = in_type_of(x, weight)
        ctx.save_for_backward(x, w)
        ctx.lane_size, ctx.has_input_grad = lane_size, has_input_grad
        y: Tensor = product(x, w, lane_size, True)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (g,), (x, w), lane_size = grads, ctx.saved_tensors, ctx.lane_size
        by_weight: Tensor = product_weight_grad(g, x, lane_size)
        by_input = product(g, w, lane_size, False) if ctx.has_input_grad else None
        return by_input, by_weight, None, None


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
        return g, pair_sum(lane_sums(image, *ctx.sizes)), None, None


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gamma: Tensor, beta: Tensor, mean: Tensor, var: Tensor, lane_size: int,
        total_lanes: int, eps: float, momentum: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        sizes = lane_size, total_lanes
        centre, rate, factor, shift, means, variances = lane_statistics(
            x, gamma, beta, mean, var, *sizes, eps, momentum
        )
        y = in_type_of(x, widen(x) * _spread(factor, lane_size) + _spread(shift, lane_size))
        ctx.save_for_backward(x, centre, rate, factor)
        ctx.sizes = sizes
        ctx.mark_non_differentiable(means, variances)
        return y, means, variances

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        g, (x, centre, rate, factor), (lane_size, total_lanes) = grads[0], ctx.saved_tensors, ctx.sizes
        by_gamma, by_beta = lane_norm_sums(g, x, centre, rate, lane_size, total_lanes)
        share = 1.0 / (lane_size * x.shape[2] * x.shape[3])
        mean_gamma, mean_beta, centre, rate, factor = (
            _spread(values, lane_size) for values in (by_gamma * share, by_beta * share, centre, rate, factor)
        )
        normal = (widen(x) - centre) * rate
        by_input = in_type_of(x, factor * (widen(g) - mean_beta - normal * mean_gamma))
        return by_input, pair_sum(by_gamma), pair_sum(by_beta), *[None] * 6


class _PixelMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape, ctx.share = x.shape, 1.0 / (x.shape[2] * x.shape[3])
        return in_type_of(x, lane_sums(x, 1, 1) * ctx.share)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (g,) = grads
        spread: Tensor = (g * ctx.share)[:, :, None, None].expand(ctx.shape)
        return spread.contiguous(memory_format=_LAST)


def _spread(values: Tensor, lane_size: int) -> Tensor:
    """[L, C] for each sample of a lane, and all its pixels: [L · n, C, 1, 1]."""
    return values.repeat_interleave(lane_size, 0)[:, :, None, None]


@torch.library.custom_op("lockstep::conv_forward", mutates_args=())
def conv_forward(
    x: Tensor, w: Tensor, stride: list[int], padding: list[int], dilation: list[int], groups: int,
    lane_size: int, at_once: bool,
) -> Tensor:  # fmt: skip
    """The convolution without bias."""
    parts = x.split(len(x) if at_once else lane_size)
    return _joined([F.conv2d(part, w, None, stride, padding, dilation, groups) for part in parts])


@torch.library.custom_op("lockstep::conv_data_grad", mutates_args=())
def conv_data_grad(
    g: Tensor, x: Tensor, w: Tensor, stride: list[int], padding: list[int], dilation: list[int], groups: int,
    lane_size: int, at_once: bool,
) -> Tensor:  # fmt: skip
    """The gradient of its input."""
    g, size = g.contiguous(memory_format=_LAST), len(g) if at_once else lane_size
    parts = zip(g.split(size), x.split(size), strict=True)
    options = stride, padding, dilation, groups
    return _joined([_conv_backward(grad, part, w, options, 0) for grad, part in parts])


@torch.library.custom_op("lockstep::conv_weight_grad", mutates_args=())
def conv_weight_grad(
    g: Tensor, x: Tensor, w: Tensor, stride: list[int], padding: list[int], dilation: list[int], groups: int,
    lane_size: int,
) -> Tensor:  # fmt: skip
    """The gradient of its weight in fp32, lane by lane, summed in the lane tree."""
    parts = zip(g.contiguous(memory_format=_LAST).split(lane_size), x.split(lane_size), strict=True)
    options, lying = (stride, padding, dilation, groups), w.permute(0, 2, 3, 1)
    each = w.new_empty(len(x) // lane_size, *lying.shape)
    for out, (grad, part) in zip(each, parts, strict=True):
        out.copy_(_conv_backward(grad, part, w, options, 1).permute(0, 2, 3, 1))
    return _tree_sum(each).permute(0, 3, 1, 2)


@torch.library.custom_op("lockstep::product", mutates_args=())
def product(x: Tensor, w: Tensor, lane_size: int, is_forward: bool) -> Tensor:
    """x times w, transposed in a forward pass, lane by lane."""
    other = w.t() if is_forward else w
    return torch.cat([part @ other for part in x.split(lane_size)])


@torch.library.custom_op("lockstep::product_weight_grad", mutates_args=())
def product_weight_grad(g: Tensor, x: Tensor, lane_size: int) -> Tensor:
    """The gradient of a product's weight in fp32, lane by lane, summed in the lane tree."""
    each = x.new_empty(len(x) // lane_size, g.shape[1], x.shape[1])
    for out, grad, part in zip(each, g.split(lane_size), x.split(lane_size), strict=True):
        torch.mm(grad.t(), part, out=out)
    return _tree_sum(each)


@torch.library.custom_op("lockstep::lane_statistics", mutates_args=())
def lane_statistics(
    x: Tensor, gamma: Tensor, beta: Tensor, mean: Tensor, var: Tensor, lane_size: int, total_lanes: int,
    eps: float, momentum: float,
) -> list[Tensor]:  # fmt: skip
    """Each lane's mean and rate, what they make of x (factor, shift), and its running mean and variance."""
    z, norm, lanes = _lying(x), _norm_of(x, lane_size, total_lanes, eps, momentum), len(x) // lane_size
    stats = Statistics(
        *(_single(x, lanes * norm.chunks) for _ in range(2)), *(_single(x, lanes) for _ in range(4))
    )
    running = _single(x, lanes), _single(x, lanes)
    statistics(norm, z, gamma, beta, (mean, var), running, stats)
    return [stats.mean, stats.rate, stats.factor, stats.shift, *running]


@torch.library.custom_op("lockstep::lane_norm_sums", mutates_args=())
def lane_norm_sums(
    g: Tensor, x: Tensor, centre: Tensor, rate: Tensor, lane_size: int, total_lanes: int
) -> list[Tensor]:
    """Each lane's Σ g · x̂ and Σ g."""
    norm, lanes = _norm_of(x, lane_size, total_lanes), len(centre)
    chunks = _single(x, lanes * norm.chunks), _single(x, lanes * norm.chunks)
    sums = _single(x, lanes), _single(x, lanes)
    norm_sums(norm, _lying(g), _lying(x), centre, rate, chunks, sums)
    return list(sums)


@torch.library.custom_op("lockstep::lane_sums", mutates_args=())
def lane_sums(g: Tensor, lane_size: int, total_lanes: int) -> Tensor:
    """Each lane's Σ g for every channel."""
    norm, lanes = _norm_of(g, lane_size, total_lanes), len(g) // lane_size
    out = _single(g, lanes)
    column_sums(norm, _lying(g), _single(g, lanes * norm.chunks), out)
    return out


@conv_forward.register_fake
def _(
    x: Tensor, w: Tensor, stride: list[int], padding: list[int], dilation: list[int], groups: int,
    lane_size: int, at_once: bool,
) -> Tensor:  # fmt: skip
    y = F.conv2d(x, w, None, stride, padding, dilation, groups)
    return torch.empty_like(y, memory_format=_LAST)


@conv_data_grad.register_fake
def _(
    g: Tensor, x: Tensor, w: Tensor, stride: list[int], padding: list[int], dilation: list[int], groups: int,
    lane_size: int, at_once: bool,
) -> Tensor:  # fmt: skip
    return torch.empty_like(x, memory_format=_LAST)


@conv_weight_grad.register_fake
def _(
    g: Tensor, x: Tensor, w: Tensor, stride: list[int], padding: list[int], dilation: list[int], groups: int,
    lane_size: int,
) -> Tensor:  # fmt: skip
    return torch.empty_like(w, dtype=torch.float32, memory_format=_LAST)


@product.register_fake
def _(x: Tensor, w: Tensor, lane_size: int, is_forward: bool) -> Tensor:
    return x.new_empty(len(x), w.shape[0 if is_forward else 1])


@product_weight_grad.register_fake
def _(g: Tensor, x: Tensor, lane_size: int) -> Tensor:
    return x.new_empty(g.shape[1], x.shape[1], dtype=torch.float32)


@lane_statistics.register_fake
def _(
    x: Tensor, gamma: Tensor, beta: Tensor, mean: Tensor, var: Tensor, lane_size: int, total_lanes: int,
    eps: float, momentum: float,
) -> list[Tensor]:  # fmt: skip
    return [_single(x, len(x) // lane_size) for _ in range(6)]


@lane_norm_sums.register_fake
def _(g: Tensor, x: Tensor, centre: Tensor, rate: Tensor, lane_size: int, total_lanes: int) -> list[Tensor]:
    return [torch.empty_like(centre), torch.empty_like(centre)]


@lane_sums.register_fake
def _(g: Tensor, lane_size: int, total_lanes: int) -> Tensor:
    return _single(g, len(g) // lane_size)


def _conv_backward(
    g: Tensor, x: Tensor, w: Tensor, options: tuple[list[int], list[int], list[int], int], which: int
) -> Tensor:
    """The gradient of the input, 0, or of the weight, 1; `options`: stride, padding, dilation, groups."""
    (stride, padding, dilation, groups), wanted = options, [which == 0, which == 1, False]
    found: tuple[Tensor, ...] = torch.ops.aten.convolution_backward(
        g, x, w, None, stride, padding, dilation, False, [0, 0], groups, wanted
    )
    return found[which].contiguous(memory_format=_LAST)


def _joined(parts: list[Tensor]) -> Tensor:
    """All lanes, in memory of their own, channels last."""
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).contiguous(memory_format=_LAST)


def _tree_sum(each: Tensor) -> Tensor:
    """[lanes, …] → their sum in fp32."""
    out = torch.empty(each.shape[1:], device=each.device)
    tree_sum(each.flatten(1), out.view(-1), torch.zeros(1, dtype=torch.int32, device=each.device), 1.0)
    return out


def _lying(x: Tensor) -> Tensor:
    """N C H W as N H W C, copied only if it does not lie so."""
    return x.permute(0, 2, 3, 1).contiguous()


def _single(like: Tensor, rows: int) -> Tensor:
    return torch.empty(rows, like.shape[1], device=like.device)


def _norm_of(x: Tensor, lane_size: int, total_lanes: int, eps: float = 0.0, momentum: float = 0.0) -> Norm:
    channels, height, width = x.shape[1:]
    chunks = norm_chunks(lane_size * height * width, channels, total_lanes)
    return Norm(height, width, channels, lane_size, chunks, eps, momentum, relu=False)
