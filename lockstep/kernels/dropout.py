"""Dropout in torch; its mask is a function of (seed, step, lane, layer), again in `fused_forward.py`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lockstep.kernels import random

Drop = Callable[[Tensor, float, int, Tensor | None], Tensor]  # the last: places in the whole, see `dropout`


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


def drop_paths(x: Tensor, p: float, key: int, places: Tensor | None = None) -> Tensor:
    """Stochastic depth: zero whole samples with probability `p`, and scale the rest by 1/(1−p)."""
    if p >= 1.0:
        return x * 0.0
    return x * (_paths(x, p, key) * (1.0 / (1.0 - p)))


def drop_paths_unscaled(x: Tensor, p: float, key: int, places: Tensor | None = None) -> Tensor:
    """The same without the scale."""
    return x * _paths(x, p, key)


def find_drop(module: nn.Module) -> tuple[Drop, str] | None:
    """What a layer drops, and its attribute that holds the probability; None of any other module.

    Layers of stochastic depth are known by name and settings: neither timm nor torchvision is imported.
    """
    kind, told = type(module), vars(module)
    if kind in _DROPOUTS:
        return _DROPOUTS[kind], "p"
    if kind.__name__ == "DropPath" and "drop_prob" in told:
        return (drop_paths if told.get("scale_by_keep", True) else drop_paths_unscaled), "drop_prob"
    if kind.__name__ == "StochasticDepth" and told.get("mode") == "row":
        return drop_paths, "p"
    return None


def _paths(x: Tensor, p: float, key: int) -> Tensor:
    kept = _keep(x.shape[:1], x.device, p, key, None)
    return kept.to(x.dtype).view(-1, *[1] * (x.dim() - 1))


_DROPOUTS: dict[type[nn.Module], Drop] = {
    nn.Dropout: dropout,
    nn.Dropout1d: dropout_channels,
    nn.Dropout2d: dropout_channels,
    nn.Dropout3d: dropout_channels,
}
