"""Gaussian blur: two passes of fixed-point weights, of 64 values of sigma; borders are mirrored."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from lockstep.data.changes.group_change import GroupChange, change_groups
from lockstep.data.changes.sample_draw import SampleDraw

_SIGMAS = 64
_WEIGHT_BITS = 14  # weights in 1/16384: with 8 more bits between the passes, sums stay below 2³¹
_BETWEEN_BITS = 8


def gaussian_blur(images: Tensor, draw: SampleDraw, p: float, sigma_min: float, sigma_max: float) -> Tensor:
    """Blur an image with probability `p`, by a random sigma; the kernel reaches as far as 3 sigma."""
    radii, weights = _kernels(sigma_min, sigma_max)
    drawn = draw.integers("gaussian_blur-sigma", 0, _SIGMAS - 1)
    groups = radii[drawn] * draw.chance("gaussian_blur", p)
    changes: list[GroupChange] = [None]
    changes += [(blur, weights[drawn, : radius + 1]) for radius in range(1, weights.shape[1])]
    return change_groups(images, groups, changes)


def blur(images: Tensor, weights: Tensor) -> Tensor:
    """Blur images by weights [N, 1 + radius] of the centre and of the neighbours at either side."""
    weights = weights.int()
    across = _blur_rows(images.int(), weights, _WEIGHT_BITS - _BETWEEN_BITS)
    down = _blur_rows(across.transpose(2, 3).contiguous(), weights, _WEIGHT_BITS + _BETWEEN_BITS)
    return down.transpose(2, 3).to(torch.uint8)


def _blur_rows(images: Tensor, weights: Tensor, shift: int) -> Tensor:
    """Sum each pixel and its neighbours in its row, times their weights; round `shift` bits away."""
    width, radius = images.shape[3], weights.shape[1] - 1
    mirrored = torch.tensor(_mirror(width, radius), device=images.device)
    wide = images.index_select(3, mirrored)
    total = images * weights[:, 0].view(-1, 1, 1, 1)
    for step in range(1, radius + 1):
        sides = wide[..., radius - step :][..., :width] + wide[..., radius + step :][..., :width]
        total += sides * weights[:, step].view(-1, 1, 1, 1)
    return (total + (1 << (shift - 1))) >> shift


def _mirror(length: int, radius: int) -> list[int]:
    """Places from −radius to length + radius, mirrored at the first and last pixel."""
    period = max(2 * (length - 1), 1)
    places = (place % period for place in range(-radius, length + radius))
    return [min(place, period - place) if length > 1 else 0 for place in places]


@lru_cache(maxsize=8)
def _kernels(sigma_min: float, sigma_max: float) -> tuple[Tensor, Tensor]:
    """The radius and the weights of each sigma; the weights of a whole kernel add up to 1."""
    sigmas = [sigma_min + (sigma_max - sigma_min) * (place + 0.5) / _SIGMAS for place in range(_SIGMAS)]
    radii = [math.ceil(3 * sigma) for sigma in sigmas]
    weights = torch.zeros(_SIGMAS, max(radii) + 1, dtype=torch.int64)
    for place, (sigma, radius) in enumerate(zip(sigmas, radii, strict=True)):
        bell = [math.exp(-0.5 * (step / sigma) ** 2) for step in range(radius + 1)]
        whole = 2 * sum(bell) - 1
        sides = [round(height / whole * (1 << _WEIGHT_BITS)) for height in bell[1:]]
        weights[place, : radius + 1] = torch.tensor([(1 << _WEIGHT_BITS) - 2 * sum(sides), *sides])
    return torch.tensor(radii), weights
