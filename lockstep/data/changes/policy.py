"""RandAugment and TrivialAugment, with torchvision's 14 operations and magnitudes of 31 bins."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from lockstep.data.changes import color, tone
from lockstep.data.changes.geometry import affine, rotate_map, shear_x_map, shear_y_map, translate_map
from lockstep.data.changes.group_change import GroupChange, change_groups
from lockstep.data.changes.sample_draw import SampleDraw

_LAST = 30  # bins are 0 to 30


def rand_augment(images: Tensor, draw: SampleDraw, num_ops: float, magnitude: float) -> Tensor:
    """Apply `num_ops` operations, drawn anew for each sample, all of one magnitude."""
    bins = torch.full_like(draw.ids, int(magnitude))
    for turn in range(int(num_ops)):
        images = _apply_one(images, draw, f"rand_augment-{turn}", bins, False)
    return images


def trivial_augment(images: Tensor, draw: SampleDraw) -> Tensor:
    """Apply one operation of a random magnitude, from wider ranges."""
    bins = draw.integers("trivial_augment-bin", 0, _LAST)
    return _apply_one(images, draw, "trivial_augment", bins, True)


def _apply_one(images: Tensor, draw: SampleDraw, what: str, bins: Tensor, wide: bool) -> Tensor:
    operations = _operations(wide, *images.shape[2:])
    chosen = draw.integers(f"{what}-operation", 0, len(operations) - 1)
    places = draw.integers(f"{what}-sign", 0, 1) * (_LAST + 1) + bins
    changes = [entry and (entry[0], entry[1][places]) for entry in operations]
    return change_groups(images, chosen, changes)


@lru_cache(maxsize=8)
def _operations(wide: bool, height: int, width: int) -> list[GroupChange]:
    """Each operation with its value for each sign and bin; None is the identity."""
    bins = [*range(_LAST + 1)] * 2
    signed = [sign * place for sign in (1, -1) for place in range(_LAST + 1)]
    steepest, degrees, strength, lost_bits = (0.99, 135, 0.99, 6) if wide else (0.3, 30, 0.9, 4)
    right, down = (32, 32) if wide else (150 / 331 * width, 150 / 331 * height)
    slopes = [steepest * place / _LAST for place in signed]
    factors = torch.tensor([tone.ONE + round(tone.ONE * strength * place / _LAST) for place in signed])
    unused = torch.tensor(bins)
    return [
        None,
        (affine, torch.tensor([shear_x_map(slope) for slope in slopes])),
        (affine, torch.tensor([shear_y_map(slope) for slope in slopes])),
        (affine, torch.tensor([translate_map(int(right * place / _LAST), 0) for place in signed])),
        (affine, torch.tensor([translate_map(0, int(down * place / _LAST)) for place in signed])),
        (affine, torch.tensor([rotate_map(degrees * place / _LAST, height, width) for place in signed])),
        (tone.brightness, factors),
        (color.saturation, factors),
        (tone.contrast, factors),
        (color.sharpness, factors),
        (tone.posterize, torch.tensor([8 - round(lost_bits * place / _LAST) for place in bins])),
        (tone.solarize, torch.tensor([-(-255 * (_LAST - place) // _LAST) for place in bins])),
        (tone.autocontrast, unused),
        (tone.equalize, unused),
    ]
