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

    With v the largest channel and d its distance from the smallest, d times the hue is a whole number, and so
    is what a channel differs from v by: nothing is divided.
    """
    if images.shape[1] == 1:
        return images
    red, green, blue = images.int().unbind(1)
    value = torch.maximum(torch.maximum(red, green), blue)
    spread = value - torch.minimum(torch.minimum(red, green), blue)
    place = _where_negative(green - value, red - green + 4 * spread, blue - red + 2 * spread)
    place = _where_negative(red - value, place, green - blue)  # from −1 to 5 sextants
    angles = (angles + 5 * ONE) % CIRCLE - 5 * ONE  # from −5 to below 1, so that one wrap is enough
    place = place * ONE + spread * angles.int().view(-1, 1, 1)
    sextant = spread * ONE
    place = _where_negative(place, place + 6 * sextant, place)
    lost = (
        2 * sextant - (place - 3 * sextant).abs_(),
        (place - 2 * sextant).abs_() - sextant,
        (place - 4 * sextant).abs_() - sextant,
    )
    channels = [value * ONE - torch.minimum(part.clamp_(min=0), sextant) for part in lost]
    return ((torch.stack(channels, 1) + ONE // 2) >> FACTOR_BITS).to(torch.uint8)


def _where_negative(sign: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    """Choose by the sign of an int32; `torch.where` takes ten times as long on a CPU."""
    return no + ((yes - no) & (sign >> 31))


def _blend(images: Tensor, base: Tensor, factors: Tensor) -> Tensor:
    """Compute base + factor · (image − base), cut to 0 to 255; `base` is int32."""
    factors = factors.int().view(-1, 1, 1, 1)
    mixed = images.int() * factors + base * (ONE - factors)
    return (mixed >> FACTOR_BITS).clamp_(0, 255).to(torch.uint8)
