"""Operations that mix channels or neighbouring pixels: saturation, hue, sharpness."""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.data.changes.tone import FACTOR_BITS, ONE, luma

CIRCLE = 6 * ONE  # of hues: six sextants, in 1/4096
_THIRTEENTH = 5042  # of 65536, rounded up: right for all sums of a 3×3 window


def saturation(images: Tensor, factors: Tensor) -> Tensor:
    """Blend with gray: factor 0 is the gray image, 1 the image."""
    return images if images.shape[1] == 1 else _blend(images, luma(images), factors)


def sharpness(images: Tensor, factors: Tensor) -> Tensor:
    """Blend with a smoothed image (3×3, centre 5/13, the others 1/13); the border stays."""
    if min(images.shape[2:]) < 3:
        return images
    wide = images.short()
    rows = wide[..., :-2, :] + wide[..., 1:-1, :] + wide[..., 2:, :]
    sums = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:] + 4 * wide[..., 1:-1, 1:-1]
    smooth = ((sums + 6).int() * _THIRTEENTH) >> 16
    out = images.clone()
    out[..., 1:-1, 1:-1] = _blend(images[..., 1:-1, 1:-1], smooth, factors)
    return out


def hue(images: Tensor, angles: Tensor) -> Tensor:
    """Turn the hue by angles from 0 to CIRCLE; value and saturation of HSV stay.

    With v the largest channel and d its distance from the smallest, d times the hue is a whole number, so
    nothing is divided. A channel is v − d · max(min(k, 4 − k, 1), 0), where k is its place on the circle.
    """
    if images.shape[1] == 1:
        return images
    red, green, blue = images.int().unbind(1)
    value = torch.maximum(torch.maximum(red, green), blue)
    spread = value - torch.minimum(torch.minimum(red, green), blue)
    second = torch.where(green == value, blue - red + 2 * spread, red - green + 4 * spread)
    place = torch.where(red == value, green - blue, second) * ONE + spread * angles.int().view(-1, 1, 1)
    sextant = spread * ONE
    channels = []
    for start in (5, 3, 1):
        distance = place + start * sextant
        distance = _wrap(_wrap(distance, 12 * sextant), 6 * sextant)
        part = torch.minimum(distance, 4 * sextant - distance).clamp_(min=0)
        channels.append((value * ONE - torch.minimum(part, sextant) + ONE // 2) >> FACTOR_BITS)
    return torch.stack(channels, 1).to(torch.uint8)


def _wrap(distance: Tensor, circle: Tensor) -> Tensor:
    """Bring distances from 0 to twice a circle into the circle."""
    return torch.where(distance < circle, distance, distance - circle)


def _blend(images: Tensor, base: Tensor, factors: Tensor) -> Tensor:
    """Compute base + factor · (image − base), cut to 0 to 255; `base` is int32."""
    factors = factors.int().view(-1, 1, 1, 1)
    mixed = images.int() * factors + base * (ONE - factors)
    return (mixed >> FACTOR_BITS).clamp_(0, 255).to(torch.uint8)
