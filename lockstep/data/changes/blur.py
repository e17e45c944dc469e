"""Gaussian blur: two passes of fixed-point weights, of 64 values of sigma; borders are mirrored."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from lockstep.data.changes.group_change import GroupChange, change_groups
from lockstep.data.changes.sample_draw import SampleDraw
from lockstep.kernels.structure import place

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
    down = _blur_columns(images.int(), weights, _WEIGHT_BITS - _BETWEEN_BITS)
    across = _blur_columns(down.transpose(2, 3).contiguous(), weights, _WEIGHT_BITS + _BETWEEN_BITS)
    return across.transpose(2, 3).to(torch.uint8)


def _blur_columns(images: Tensor, weights: Tensor, shift: int) -> Tensor:
    """Sum each pixel and its neighbours above and below, times their weights; round `shift` bits away."""
    height, radius = images.shape[2], weights.shape[1] - 1
    mirrored = place(torch.tensor(_mirror(height, radius)), images.device)
    tall = images.index_select(2, mirrored)
    total = images * weights[:, 0].view(-1, 1, 1, 1)
    for step in range(1, radius + 1):
        sides = tall.narrow(2, radius - step, height) + tall.narrow(2, radius + step, height)
        total += sides * weights[:, step].view(-1, 1, 1, 1)
    return (total + (1 << (shift - 1))) >> shift


def _mirror(length: int, radius: int) -> list[int]:
    """Places from −radius to length + radius, mirrored at the first and last pixel."""
    period = max(2 * (length - 1), 1)
    distances = (start % period for start in range(-radius, length + radius))
    return [min(distance, period - distance) for distance in distances]


@lru_cache(maxsize=8)
def _kernels(sigma_min: float, sigma_max: float) -> tuple[Tensor, Tensor]:
    """The radius and the weights of each sigma; the weights of a whole kernel add up to 1."""
    sigmas = [sigma_min + (sigma_max - sigma_min) * (level + 0.5) / _SIGMAS for level in range(_SIGMAS)]
    radii = [math.ceil(3 * sigma) for sigma in sigmas]
    weights = torch.zeros(_SIGMAS, max(radii) + 1, dtype=torch.int64)
    for level, (sigma, radius) in enumerate(zip(sigmas, radii, strict=True)):
        bell = [math.exp(-0.5 * (step / sigma) ** 2) for step in range(radius + 1)]
        whole = 2 * sum(bell) - 1
        sides = [round(height / whole * (1 << _WEIGHT_BITS)) for height in bell[1:]]
        weights[level, : radius + 1] = torch.tensor([(1 << _WEIGHT_BITS) - 2 * sum(sides), *sides])
    return torch.tensor(radii), weights
