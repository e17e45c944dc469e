"""Stock convolutions and products over the samples of several lanes, and batch norm by lane, with gradients.

What reduces over samples is computed lane by lane by a stock kernel, or by one of ours whose sums are cut
alike for any number of lanes; lanes are summed as pairs. All else is pointwise, which a compiler may fuse as
it likes.

Shapes: x [L · n, C, …], L lanes of n samples, lying channels last; a lane's statistics are [L, C].
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lockstep.kernels.device.norm import Norm, Statistics, norm_chunks, statistics
from lockstep.kernels.device.norm_grad import column_sums, norm_sums
from lockstep.kernels.lrn import in_type_of, widen

_Pair = tuple[int, int]
_Tensors = tuple[Tensor, Tensor]


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
    found: Tensor = _Conv.apply(x, weight, bias, x.requires_grad, *conv)
    return found


def lane_linear(x: Tensor, weight: Tensor, bias: Tensor | None, lane_size: int, total_lanes: int) -> Tensor:
    """x [L · n, features] through a fully connected layer, lane by lane."""
    found: Tensor = _Linear.apply(x, weight, bias, x.requires_grad, lane_size, total_lanes)
    return found


def lane_norm(
    x: Tensor, gamma: Tensor, beta: Tensor, running: _Tensors, norm: tuple[int, int, float, float]
) -> tuple[Tensor, Tensor, Tensor]:
    """Batch norm by the statistics of each lane; `norm` is n, all lanes of a run, eps and momentum.

    Gives the running mean and variance too, summed over lanes.
    """
    y, means, variances = _Norm.apply(x, gamma, beta, *running, *norm)
    return y, pair_sum(means), pair_sum(variances)


def pair_sum(parts: Tensor | list[Tensor]) -> Tensor:
    """The sum of a power of two of parts as balanced pairs: the lane tree."""
    rows: list[Tensor] = list(parts)
    while len(rows) > 1:
        rows = [left + right for left, right in zip(rows[::2], rows[1::2], strict=True)]
    return rows[0]


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, has_input_grad: bool, *options: Any
    ) -> Tensor:
        conv = Conv(*options)
        w = in_type_of(x, weight)
        b = None if bias is None else in_type_of(x, bias)
        ctx.save_for_backward(x, w)
        ctx.conv, ctx.has_bias, ctx.has_input_grad = conv, bias is not None, has_input_grad

        def run(part: Tensor) -> Tensor:
            return F.conv2d(part, w, b, conv.stride, conv.padding, conv.dilation, conv.groups)

        return run(x) if conv.forward_at_once else _joined([run(part) for part in x.split(conv.lane_size)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (g,), (x, w), conv = grads, ctx.saved_tensors, ctx.conv

        def run(grad: Tensor, part: Tensor, is_weight: bool) -> Tensor:
            found: tuple[Tensor, ...] = torch.ops.aten.convolution_backward(
                grad, part, w, None, conv.stride, conv.padding, conv.dilation, False, [0, 0], conv.groups,
                [not is_weight, is_weight, False],
            )  # fmt: skip
            return found[1] if is_weight else found[0]

        parts = list(zip(g.split(conv.lane_size), x.split(conv.lane_size), strict=True))
        by_weight = pair_sum([widen(run(grad, part, True)) for grad, part in parts])
        by_bias = pair_sum(lane_sums(g, conv.lane_size, conv.total_lanes)) if ctx.has_bias else None
        by_input = None
        if ctx.has_input_grad:
            each = [(g, x)] if conv.gradient_at_once else parts
            by_input = _joined([run(grad, part, False) for grad, part in each])
        return by_input, by_weight, by_bias, *[None] * 9


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, has_input_grad: bool, lane_size: int,
        total_lanes: int,
    ) -> Tensor:  # fmt: skip
        w = in_type_of(x, weight)
        b = None if bias is None else in_type_of(x, bias)
        ctx.save_for_backward(x, w)
        ctx.sizes = lane_size, total_lanes
        ctx.has_bias, ctx.has_input_grad = bias is not None, has_input_grad
        return _joined([F.linear(part, w, b) for part in x.split(lane_size)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (g,), (x, w), (lane_size, total_lanes) = grads, ctx.saved_tensors, ctx.sizes
        parts = g.split(lane_size)
        each = [widen(grad.t() @ part) for grad, part in zip(parts, x.split(lane_size), strict=True)]
        by_weight = pair_sum(each)
        by_bias = pair_sum(lane_sums(g[:, :, None, None], lane_size, total_lanes)) if ctx.has_bias else None
        by_input = _joined([grad @ w for grad in parts]) if ctx.has_input_grad else None
        return by_input, by_weight, by_bias, None, None, None


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


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _spread(values: Tensor, lane_size: int) -> Tensor:
    """[L, C] for each sample of a lane, and all its pixels: [L · n, C, 1, 1]."""
    return values.repeat_interleave(lane_size, 0)[:, :, None, None]


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


def _lying(x: Tensor) -> Tensor:
    """N C H W as N H W C, copied only if it does not lie so."""
    return x.permute(0, 2, 3, 1).contiguous()


def _single(like: Tensor, rows: int) -> Tensor:
    return torch.empty(rows, like.shape[1], device=like.device)


def _norm_of(x: Tensor, lane_size: int, total_lanes: int, eps: float = 0.0, momentum: float = 0.0) -> Norm:
    channels, height, width = x.shape[1:]
    chunks = norm_chunks(lane_size * height * width, channels, total_lanes)
    return Norm(height, width, channels, lane_size, chunks, eps, momentum, relu=False)
