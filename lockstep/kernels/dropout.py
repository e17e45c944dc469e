"""Dropout in torch; its mask is a function of (seed, step, lane, layer), again in `fused_forward.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.kernels import random


def dropout(x: Tensor, p: float, key: int, places: Tensor | None = None) -> Tensor:
    """Zero each element with probability `p` and scale the rest by 1/(1−p).

    `places` are those of the elements in a whole of which `x` is a part.
    """
    if p >= 1.0:
        return x * 0.0
    return x * _keep(x.shape, x.device, p, key, places).to(x.dtype).mul_(1.0 / (1.0 - p))


def dropout_channels(x: Tensor, p: float, key: int, places: Tensor | None = None) -> Tensor:
    """Zero whole channels of an [N, C, …] tensor with probability `p` and scale the rest by 1/(1−p)."""
    if p >= 1.0:
        return x * 0.0
    keep = _keep(x.shape[:2], x.device, p, key, places).to(x.dtype).mul_(1.0 / (1.0 - p))
    return x * keep.view(*x.shape[:2], *([1] * (x.dim() - 2)))


def _keep(shape: torch.Size, device: torch.device, p: float, key: int, places: Tensor | None) -> Tensor:
    counter = torch.arange(shape.numel(), device=device) if places is None else places
    return (random.uniform(key, counter) >= p).view(shape)
