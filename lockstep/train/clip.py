"""Gradient clipping on host and device: by value, or by the norm, whose sum no slice or bucket changes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lockstep.comm.tree import tree_sum

_CHUNK = 1 << 16


@torch.no_grad()
def clip_gradients(grads: list[Tensor], norm: Tensor, limit: float) -> None:
    """Scale gradients, whose norm is `norm`, in place, so that it becomes at most `limit`."""
    if grads:
        torch._foreach_mul_(grads, (limit / (norm + 1e-6)).clamp(max=1.0))


@torch.no_grad()
def clip_values(grads: list[Tensor], limit: float) -> None:
    """Move values of gradients that are larger than `limit`, or below minus that, to it, in place."""
    if grads:
        torch._foreach_clamp_max_(grads, limit)
        torch._foreach_clamp_min_(grads, -limit)


@torch.no_grad()
def gradient_norm(grads: Mapping[str, Tensor]) -> Tensor:
    """√Σg²: squares summed over chunks of 2¹⁶ elements of each parameter, then over chunks in name order."""
    return norm_of_chunks({(name, 0): chunk_sums(grad) for name, grad in grads.items()})


@torch.no_grad()
def norm_of_chunks(chunks: Mapping[tuple[str, int], Tensor]) -> Tensor:
    """The same from the `chunk_sums` of each gradient, or piece of one, by name and first element."""
    return tree_sum(torch.cat([chunks[name] for name in sorted(chunks)])).double().sqrt().float()


@torch.no_grad()
def chunk_sums(grad: Tensor) -> Tensor:
    """The sum of squares of each 2¹⁶ elements, by a balanced tree, so that it is the same on every device."""
    flat = grad.contiguous().flatten().float()
    width = min(_CHUNK, 1 << max(flat.numel() - 1, 0).bit_length())
    padded = torch.nn.functional.pad(flat, (0, -flat.numel() % width))
    return tree_sum(padded.square().view(-1, width).t())
