"""A value's way from its parts to the whole and back, with gradients.

What every worker has whole, every worker computes alike; so its gradient is whole everywhere, too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lockstep.parallel.split.axes import Axes
from lockstep.parallel.split.spread import Spread


def to_whole(x: Tensor, axes: Axes, spread: Spread) -> Tensor:
    """All of a value, of which each worker has its part."""
    return x if axes.is_alone(spread) else _ToWhole.apply(x, axes, spread)  # type: ignore[no-untyped-call]


def to_part(x: Tensor, axes: Axes, spread: Spread) -> Tensor:
    """This worker's part of a value that every worker has whole."""
    return x if axes.is_alone(spread) else _ToPart.apply(x, axes, spread)  # type: ignore[no-untyped-call]


class _ToWhole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axes: Axes, spread: Spread) -> Tensor:
        ctx.axes, ctx.spread = axes, spread
        found = axes.whole(x, spread)
        return x.view_as(x) if found is x else found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.axes.own_part(grad, ctx.spread).contiguous(), None, None


class _ToPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axes: Axes, spread: Spread) -> Tensor:
        ctx.axes, ctx.spread = axes, spread
        return axes.own_part(x, spread).clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.axes.whole(grad, ctx.spread), None, None
