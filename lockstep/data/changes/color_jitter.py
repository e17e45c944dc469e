"""Random brightness, contrast, saturation and hue in a random order, and random grayscale."""

from __future__ import annotations

from itertools import permutations

import torch
from torch import Tensor

from lockstep.data.changes import color, tone
from lockstep.data.changes.group_change import GroupChange, change_groups
from lockstep.data.changes.sample_draw import SampleDraw

_ORDERS = torch.tensor(list(permutations(range(4))))


def color_jitter(
    images: Tensor, draw: SampleDraw, brightness: float, contrast: float, saturation: float, hue: float
) -> Tensor:
    """Change the first three by factors of 1 ± their number, hue by ± `hue` of a circle, in any order."""
    changes: list[GroupChange] = []
    factored = ((tone.brightness, brightness), (tone.contrast, contrast), (color.saturation, saturation))
    for operation, number in factored:
        low, high = round(tone.ONE * max(1 - number, 0)), round(tone.ONE * (1 + number))
        factors = draw.integers(f"color_jitter-{operation.__name__}", low, high)
        changes.append((operation, factors) if number else None)
    turn = round(color.CIRCLE * hue)
    angles = draw.integers("color_jitter-hue", -turn, turn) % color.CIRCLE
    changes.append((color.hue, angles) if turn else None)
    orders = _ORDERS[draw.integers("color_jitter-order", 0, len(_ORDERS) - 1)]
    for groups in orders.unbind(1):
        images = change_groups(images, groups, changes)
    return images


def grayscale(images: Tensor, draw: SampleDraw, p: float) -> Tensor:
    """Make an image gray with probability `p`."""
    chosen = draw.chance("grayscale", p).long()
    return change_groups(images, chosen, [None, (tone.gray, chosen)])
