"""Gradient clipping on host and device: by the norm, summed in an order that no slice or bucket changes."""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.comm.tree import tree_sum

_CHUNK = 1 << 16


@torch.no_grad()
def clip_gradients(grads: list[Tensor], norm: Tensor, limit: float) -> None:
    """Scale gradients, whose norm is `norm`, in place, so that it becomes at most `limit`."""
    torch._foreach_mul_(grads, (limit / (norm + 1e-6)).clamp(max=1.0))


@torch.no_grad()
def gradient_norm(grads: dict[str, Tensor]) -> Tensor:
    """√Σg²: squares summed over chunks of 2¹⁶ elements of each parameter, then over chunks in name order."""
    chunks = torch.cat([_chunk_sums(grads[name]) for name in sorted(grads)])
    return tree_sum(chunks).double().sqrt().float()


def _chunk_sums(grad: Tensor) -> Tensor:
    """The sum of squares of each chunk, by a balanced tree, so that it is the same on every device."""
    flat = grad.contiguous().flatten().float()
    width = min(_CHUNK, 1 << max(flat.numel() - 1, 0).bit_length())
    padded = torch.nn.functional.pad(flat, (0, -flat.numel() % width))
    return tree_sum(padded.square().view(-1, width).t())
