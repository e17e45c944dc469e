"""Operations on the tone of images: each maps the 256 levels of a channel by a table, as Pillow does.

A factor is a whole number of 1/4096. Then every product of a factor and a level is exact in fp32 too, where
Pillow computes it, and both cut the same fraction off.
"""

from __future__ import annotations

import torch
from torch import Tensor

FACTOR_BITS = 12
ONE = 1 << FACTOR_BITS  # the factor 1
_RED, _GREEN, _BLUE = 19595, 38470, 7471  # of luma, in 1/65536 (ITU-R 601)


def luma(images: Tensor) -> Tensor:
    """Gray levels [N, 1, H, W] of images, int32."""
    if images.shape[1] == 1:
        return images.int()
    red, green, blue = images.int().unbind(1)
    return ((red * _RED + green * _GREEN + blue * _BLUE + (1 << 15)) >> 16)[:, None]


def gray(images: Tensor, _values: Tensor) -> Tensor:
    """Gray images with as many channels as before."""
    return luma(images).to(torch.uint8).expand_as(images)


def brightness(images: Tensor, factors: Tensor) -> Tensor:
    """Blend with black: factor 0 is black, 1 the image."""
    return _look_up(images, _blend_table(torch.zeros_like(factors), factors))


def contrast(images: Tensor, factors: Tensor) -> Tensor:
    """Blend with the mean gray level, rounded: factor 0 is that gray, 1 the image."""
    pixels = images.shape[2] * images.shape[3]
    mean = (2 * luma(images).flatten(1).sum(1) + pixels) // (2 * pixels)
    return _look_up(images, _blend_table(mean, factors))


def posterize(images: Tensor, bits: Tensor) -> Tensor:
    """Keep the highest `bits` of each level."""
    lost = 8 - bits[:, None]
    return _look_up(images, _levels(bits) >> lost << lost)


def solarize(images: Tensor, thresholds: Tensor) -> Tensor:
    """Invert levels from a threshold on."""
    levels = _levels(thresholds).expand(len(images), -1)
    return _look_up(images, torch.where(levels < thresholds[:, None], levels, 255 - levels))


def autocontrast(images: Tensor, _values: Tensor) -> Tensor:
    """Stretch each channel so that its darkest level becomes 0 and its lightest 255."""
    pixels, levels = images.flatten(2), _levels(images)
    low, high = pixels.amin(2, keepdim=True).double(), pixels.amax(2, keepdim=True).double()
    span = (high - low).clamp_(min=1)
    scale = torch.full_like(span, 255.0) / span
    stretched = (levels * scale - low * scale).clamp_(0, 255).long()
    return _look_up(images, torch.where(high > low, stretched, levels))


def equalize(images: Tensor, _values: Tensor) -> Tensor:
    """Map each channel's levels so that their histogram becomes even."""
    num, channels = images.shape[:2]
    cells = torch.arange(num * channels, device=images.device).view(num, channels, 1) * 256
    cells = (images.flatten(2) + cells).flatten()
    counts = cells.new_zeros(num * channels * 256).scatter_add_(0, cells, torch.ones_like(cells))
    counts = counts.view(num, channels, 256)
    below = counts.cumsum(2) - counts
    lightest = images.flatten(2).amax(2, keepdim=True).long()
    step = below.gather(2, lightest) // 255
    even = ((step // 2 + below) // step.clamp(min=1)).clamp_(max=255)
    return _look_up(images, torch.where(step > 0, even, _levels(images)))


def _levels(like: Tensor) -> Tensor:
    return torch.arange(256, device=like.device)


def _blend_table(base: Tensor, factors: Tensor) -> Tensor:
    """Tables [N, 256] of base + factor · (level − base)."""
    mixed = base[:, None] * (ONE - factors[:, None]) + _levels(base) * factors[:, None]
    return (mixed >> FACTOR_BITS).clamp_(0, 255)


def _look_up(images: Tensor, tables: Tensor) -> Tensor:
    """Map levels by tables [N, 256], or [N, C, 256]."""
    tables = tables.view(len(images), -1, 256).to(torch.uint8).expand(-1, images.shape[1], -1)
    return tables.gather(2, images.flatten(2).long()).view_as(images)
