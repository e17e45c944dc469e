"""The mean over all pixels of an image whose rows are in bands: a sum for each band, then their tree."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lockstep.parallel.split.axes import Axes, sum_leaves


def banded_mean(x: Tensor, axes: Axes, rows: int, keepdim: bool) -> Tensor:
    """[N, C, H, W] → [N, C], whole along the rows."""
    mean: Tensor = _Mean.apply(x, axes, rows)  # type: ignore[no-untyped-call]
    return mean[:, :, None, None] if keepdim else mean


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axes: Axes, rows: int) -> Tensor:
        own = axes.own_rows(rows)
        ctx.shape, ctx.scale = x.shape, 1.0 / (rows * x.shape[3])
        sums = [x.narrow(2, band.start - own.start, len(band)).sum((2, 3)) for band in axes.own_bands(rows)]
        mean: Tensor = axes.sum_small(sum_leaves(sums)) * ctx.scale
        return mean

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return (grad * ctx.scale)[:, :, None, None].expand(ctx.shape).contiguous(), None, None
