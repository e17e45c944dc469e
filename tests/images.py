"""Images and weights as kernels want them, for tests against a reference in float64."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.kernels.triton.conv.fused_layer import Layer
from lockstep.kernels.triton.conv.tile import Tile

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TILE = Tile(32, 16, 16, warps=1, stages=1)


def bordered(images: Tensor, border: tuple[int, int]) -> Tensor:
    """N C H W → N H W C with zeros around."""
    return F.pad(images, (border[1],) * 2 + (border[0],) * 2).permute(0, 2, 3, 1).contiguous()


def inputs(layer: Layer, samples: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(seed)
    x = torch.randn(samples, layer.in_channels, layer.height, layer.width, device=DEVICE)
    weight = torch.randn(layer.out_channels, layer.in_channels, *layer.kernel, device=DEVICE)
    return x, weight / layer.depth**0.5, torch.randn(layer.out_channels, device=DEVICE)


def as_kernel(weight: Tensor) -> Tensor:
    """CO CI KH KW → KH · KW, CO, CI."""
    return weight.permute(2, 3, 0, 1).reshape(-1, *weight.shape[:2]).contiguous()


def gradients(layer: Layer, x: Tensor, weight: Tensor, dz: Tensor) -> tuple[Tensor, Tensor]:
    """Of the input and the weight, in float64."""
    x, weight = x.double().requires_grad_(), weight.double().requires_grad_()
    out = F.conv2d(x, weight, stride=layer.stride, padding=layer.pad)
    by_x, by_weight = torch.autograd.grad(out, (x, weight), dz.double())
    return by_x, by_weight


def near(found: Tensor, expected: Tensor) -> None:
    assert found.isfinite().all()
    error = (found.double() - expected).norm() / expected.norm().clamp_min(1e-30)
    assert error < 1e-6, float(error)
