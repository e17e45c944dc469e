"""Random erasing: a rectangle of an image becomes the data's mean colour."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from lockstep.data.changes.sample_draw import SampleDraw
from lockstep.kernels.structure import place

_SCALE = (0.02, 0.33)  # share of the image's area
_RATIO = (0.3, 3.3)  # of height to width, uniform in its logarithm
_LEVELS = 1 << 16  # of the area
_RATIOS = 256
_TRIES = 10  # for a rectangle that fits
_PLACES = 1 << 30  # far more than an image has, so the rest of a division is as good as even


def random_erasing(images: Tensor, draw: SampleDraw, fill: tuple[int, ...], p: float) -> Tensor:
    """Erase a rectangle with probability `p`; the first of ten tries that fits into the image."""
    height, width = images.shape[2:]
    top, left, rows, cols = (side[:, None] for side in _rectangles(draw, p, height, width))
    y, x = torch.arange(height) - top, torch.arange(width) - left
    in_rows, in_cols = (y >= 0) & (y < rows), (x >= 0) & (x < cols)
    parts = in_rows[:, None, :, None], in_cols[:, None, None, :], torch.tensor(fill).view(1, -1, 1, 1)
    down, across, color = place([part.to(torch.uint8) for part in parts], images.device)
    hole: Tensor = down * across
    erased: Tensor = color * hole
    return images * (1 - hole) + erased


def _rectangles(draw: SampleDraw, p: float, height: int, width: int) -> tuple[Tensor, ...]:
    """Top, left, height and width of each sample's rectangle; a height of 0 if there is none."""
    rows, cols = torch.zeros_like(draw.ids), torch.zeros_like(draw.ids)
    waits = draw.chance("random_erasing", p)
    ratios = _ratios()
    for turn in range(_TRIES):
        level = draw.integers(f"random_erasing-area-{turn}", 0, _LEVELS - 1).double() / _LEVELS
        area = (level * (_SCALE[1] - _SCALE[0]) + _SCALE[0]) * (height * width)
        ratio = ratios[draw.integers(f"random_erasing-ratio-{turn}", 0, _RATIOS - 1)]
        high, wide = (area * ratio).sqrt().add(0.5).long(), (area / ratio).sqrt().add(0.5).long()
        fits = waits & (high < height) & (wide < width)
        rows, cols = torch.where(fits, high, rows), torch.where(fits, wide, cols)
        waits = waits & ~fits
    top = draw.integers("random_erasing-top", 0, _PLACES - 1) % (height - rows + 1)
    left = draw.integers("random_erasing-left", 0, _PLACES - 1) % (width - cols + 1)
    return top, left, rows, cols


@cache
def _ratios() -> Tensor:
    """Ratios of a rectangle's sides, in 1/65536."""
    low, high = (math.log(ratio) for ratio in _RATIO)
    steps = ((level + 0.5) / _RATIOS for level in range(_RATIOS))
    fixed = [round(math.exp(low + (high - low) * step) * 65536) for step in steps]
    return torch.tensor(fixed).double() / 65536
