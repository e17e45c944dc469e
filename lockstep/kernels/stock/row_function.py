"""Autograd functions over lanes for the `compiled` set: layer norm, and factors spread over images.

They call `row_op.py`. As in `lane_function`, sums are custom ops, and the rest is pointwise and left to
torch's compiler.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lockstep.kernels.lrn import in_type_of, widen
from lockstep.kernels.stock.custom_op import lane_sums, over_lanes
from lockstep.kernels.stock.row_op import product_sum, row_statistics, row_sums

_Sizes = tuple[int, int]  # samples of a lane, lanes of the run


def lane_layer_norm(x: Tensor, gamma: Tensor, beta: Tensor, eps: float, sizes: _Sizes) -> Tensor:
    """Layer norm over the last dimension of x [N, …, C], in fp32, as under autocast."""
    y: Tensor = _LayerNorm.apply(x, gamma, beta, eps, *sizes)
    return y


def expand_to(x: Tensor, shape: torch.Size, sizes: _Sizes) -> Tensor:
    """Expand x to `shape`; its gradient is summed sample by sample, or by lanes where all samples share it.

    Only what has one value for each channel, of an image or a row, is summed so; other shapes are left to
    torch, whose sums the model's check then refuses.
    """
    own, dim = _places(x, shape), _channel_dim(x, shape)
    if not x.requires_grad or dim is None:
        return x.expand(shape)
    y: Tensor = _Spread.apply(x, shape, own, dim, *sizes)
    return y


def scale_channels(x: Tensor, factor: Tensor, sizes: _Sizes) -> Tensor:
    """x [N, C, H, W] times a factor for each channel, [N, C, 1, 1] or shared by all samples."""
    y: Tensor = _Scale.apply(x, factor, *sizes)
    return y


def is_factor(x: Tensor, factor: Tensor) -> bool:
    """Whether `scale_channels` can multiply the two."""
    return x.dim() == 4 and factor.requires_grad and _channel_dim(factor, x.shape) == 1


def _places(x: Tensor, shape: torch.Size) -> tuple[int, ...]:
    """The shape of x with the dimensions that broadcasting puts before it."""
    return (1,) * (len(shape) - x.dim()) + tuple(x.shape)


def _channel_dim(x: Tensor, shape: torch.Size) -> int | None:
    """The one dimension, besides samples, that x has all of; None if there is no such, or several."""
    own = _places(x, shape)
    if len(own) != len(shape) or len(shape) < 2 or own[0] not in (1, shape[0]):
        return None
    kept = [dim for dim in range(1, len(shape)) if own[dim] == shape[dim] and shape[dim] > 1]
    others = [dim for dim in range(1, len(shape)) if dim not in kept]
    if len(kept) != 1 or any(own[dim] != 1 for dim in others):
        return None
    return kept[0] if kept[0] in (1, len(shape) - 1) else None


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gamma: Tensor, beta: Tensor, eps: float, lane_size: int, total_lanes: int
    ) -> Tensor:
        stats = row_statistics(x, eps)
        ctx.save_for_backward(x, stats, gamma)
        ctx.sizes = lane_size, total_lanes
        mean, rate = stats[0][..., None], stats[1][..., None]
        y: Tensor = (widen(x) - mean) * rate * gamma + beta
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (g,), (x, stats, gamma) = grads, ctx.saved_tensors
        rows, each = row_sums(g, x, stats, gamma, *ctx.sizes)
        sums = over_lanes(each)
        share = 1.0 / x.shape[-1]
        mean, rate = stats[0][..., None], stats[1][..., None]
        by_normal, by_one = rows[0][..., None] * share, rows[1][..., None] * share
        normal = (widen(x) - mean) * rate
        by_input = rate * (widen(g) * gamma - by_one - normal * by_normal)
        return in_type_of(x, by_input), sums[0], sums[1], None, None, None


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, shape: torch.Size, own: tuple[int, ...], dim: int, lane_size: int, total: int
    ) -> Tensor:
        ctx.own, ctx.shape, ctx.dim, ctx.sizes, ctx.dtype = own, x.shape, dim, (lane_size, total), x.dtype
        return x.expand(shape).clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (g,) = grads
        image = g[:, :, None] if g.dim() == 2 else g.movedim(ctx.dim, 1).flatten(2)
        image = g if g.dim() == 4 and ctx.dim == 1 else image[..., None]
        is_own = ctx.own[0] == len(g)
        found = lane_sums(image, 1, 1) if is_own else over_lanes(lane_sums(image, *ctx.sizes))
        return found.to(ctx.dtype).view(ctx.shape), *[None] * 5


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor, lane_size: int, total_lanes: int) -> Tensor:
        ctx.save_for_backward(x, factor)
        ctx.sizes = lane_size, total_lanes
        return x * factor

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (g,), (x, factor) = grads, ctx.saved_tensors
        is_own = factor.dim() == 4 and len(factor) == len(x)
        found = product_sum(g, x, 1, 1) if is_own else over_lanes(product_sum(g, x, *ctx.sizes))
        by_x = in_type_of(x, g * factor)
        return by_x, in_type_of(factor, found).view(factor.shape), None, None
