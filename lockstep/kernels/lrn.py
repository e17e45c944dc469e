"""Local response normalization over neighbouring channels, with a fixed order of summation.

Each value is divided by (k + alpha / size · Σ x²)^beta, where the sum runs over `size` channels around it.
torch's own version uses AvgPool3d, whose backward has no deterministic implementation on a GPU.

Shapes: N samples, C channels, then any dimensions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def lrn(x: Tensor, size: int = 5, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0) -> Tensor:
    """Normalize `x` [N, C, …] over windows of `size` channels; half precision is computed in fp32."""
    out: Tensor = _Normalize.apply(x, size, alpha, beta, k)  # type: ignore[no-untyped-call]
    return out


class LRN(nn.Module):
    """`lrn` as a layer."""

    def __init__(self, size: int = 5, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0) -> None:
        super().__init__()
        self.size, self.alpha, self.beta, self.k = size, alpha, beta, k

    def forward(self, x: Tensor) -> Tensor:
        return lrn(x, self.size, self.alpha, self.beta, self.k)

    def extra_repr(self) -> str:
        return f"{self.size}, alpha={self.alpha}, beta={self.beta}, k={self.k}"


class _Normalize(torch.autograd.Function):
    """Saves only `x` for the backward pass; autograd would save a tensor for every shifted slice."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, size: int, alpha: float, beta: float, k: float) -> Tensor:
        wide = widen(x)
        return in_type_of(x, wide * _denominator(wide, size, alpha, k).pow(-beta))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int, float, float, float], output: Tensor) -> None:
        x, ctx.size, ctx.alpha, ctx.beta, ctx.k = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        (x,) = ctx.saved_tensors
        wide, grad_wide = widen(x), widen(grad)
        denominator = _denominator(wide, ctx.size, ctx.alpha, ctx.k)
        scaled = grad_wide * denominator.pow(-ctx.beta)
        # The gradient of a channel sums over all windows that contain it: its own window, mirrored. If `size`
        # is even, a window has one channel more before its centre than after it, so the mirror image differs.
        shared = _window_sum(scaled * wide / denominator, (ctx.size - 1) // 2, ctx.size)
        slope = 2 * ctx.beta * ctx.alpha / ctx.size
        return in_type_of(x, scaled - slope * wide * shared), None, None, None, None


def in_type_of(like: Tensor, x: Tensor) -> Tensor:
    """Cast `x` to the type of `like`, without calling `to` if `x` has that type already.

    torch 2.11 loses a compiled gradient that ends with a `to` that changes nothing.
    """
    return x if x.dtype == like.dtype else x.to(like.dtype)


def widen(x: Tensor) -> Tensor:
    """Cast half precision to fp32; leave other types as they are."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _denominator(x: Tensor, size: int, alpha: float, k: float) -> Tensor:
    return k + alpha / size * _window_sum(x * x, size // 2, size)


def _window_sum(x: Tensor, before: int, size: int) -> Tensor:
    """For each channel c, sum `size` channels from c − before upwards, in this order; missing ones are 0."""
    edges = [0, 0] * (x.dim() - 2) + [before, size - 1 - before]
    padded = F.pad(x, edges)
    num_channels = x.shape[1]
    total = padded.narrow(1, 0, num_channels)
    for offset in range(1, size):
        total = total + padded.narrow(1, offset, num_channels)
    return total
