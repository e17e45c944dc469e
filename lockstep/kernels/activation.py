"""Activations that a batch norm applies itself, and their gradients; in Triton in `norm_gradient.py`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def activate(act: str, x: Tensor) -> Tensor:
    """Apply `relu`, `silu` or `hardswish`; an empty name is no activation."""
    if act == "relu":
        return torch.relu(x)
    if act == "silu":
        return F.silu(x)
    return F.hardswish(x) if act else x


def activate_back(act: str, x: Tensor, grad: Tensor) -> Tensor:
    """The gradient of the input `x` of an activation."""
    if act == "relu":
        return torch.where(x > 0, grad, 0.0)
    if act == "silu":
        part = torch.sigmoid(x)
        return grad * (part * (1.0 + x * (1.0 - part)))
    inner = torch.where(x < 3.0, grad * (x * (1.0 / 3.0) + 0.5), grad)
    return torch.where(x <= -3.0, 0.0, inner)
