"""The augmentations of `data.augment`: their numbers with defaults and ranges, and the check of an item.

An item is a name, or a name and numbers after colons: `flip`, `crop:4`, `color_jitter:0.4:0.4`. Numbers that
are left out have their defaults. Names and defaults are torchvision's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from lockstep.errors import SpecError, unknown


class Number(NamedTuple):
    """A number of an augmentation, from `low` to `high`."""

    name: str
    default: float
    low: float
    high: float
    whole: bool = False


MOVES = ("flip", "crop", "cutout")
CHANGES: dict[str, tuple[Number, ...]] = {
    "rand_augment": (Number("num_ops", 2, 1, 16, True), Number("magnitude", 9, 0, 30, True)),
    "trivial_augment": (),
    "color_jitter": (
        Number("brightness", 0.4, 0, 10),
        Number("contrast", 0.4, 0, 10),
        Number("saturation", 0.4, 0, 10),
        Number("hue", 0, 0, 0.5),
    ),
    "grayscale": (Number("p", 0.1, 0, 1),),
    "gaussian_blur": (
        Number("p", 0.5, 0, 1),
        Number("sigma_min", 0.1, 0.1, 10),
        Number("sigma_max", 2.0, 0.1, 10),
    ),
    "random_erasing": (Number("p", 0.5, 0, 1),),
}
CROPS = {"random_resized_crop": (Number("min_scale", 0.08, 0.01, 1), Number("max_scale", 1, 0.01, 1))}
MIXES = {"mixup": (Number("alpha", 0.2, 0.01, 100),), "cutmix": (Number("alpha", 1.0, 0.01, 100),)}
AUGMENTATIONS = {**CHANGES, **CROPS, **MIXES}


def mixes(items: Iterable[str]) -> str:
    """The first item that mixes two samples; empty if there is none."""
    return next((item for item in items if item.partition(":")[0] in MIXES), "")


def check_item(item: str) -> None:
    """Refuse an item of `data.augment` that names no augmentation, or has numbers that do not fit it."""
    name, _, numbers = item.partition(":")
    if name in AUGMENTATIONS:
        read_numbers(item)
    elif name not in MOVES:
        raise SpecError(f"data.augment: {unknown('augmentation', name, (*MOVES, *AUGMENTATIONS))}")
    elif name == "flip" and numbers:
        raise SpecError(f"data.augment: '{item}' must be flip alone, without numbers")
    elif numbers and not (name != "flip" and numbers.isdecimal() and 0 < int(numbers) < 10_000):
        raise SpecError(f"data.augment: '{item}' must be like crop:4 or cutout:8, in pixels")


def read_numbers(item: str) -> tuple[float, ...]:
    """All numbers of an item such as `color_jitter:0.4`: those it gives, and defaults for the others."""
    name, *texts = item.split(":")
    numbers = AUGMENTATIONS[name]
    plain = len(texts) <= len(numbers) and all(re.fullmatch(r"[0-9]*\.?[0-9]+", text) for text in texts)
    values = [float(text) for text in texts] if plain else []
    values += [float(number.default) for number in numbers[len(values) :]]
    fits = all(
        number.low <= value <= number.high and (not number.whole or value.is_integer())
        for number, value in zip(numbers, values, strict=True)
    )
    ordered = all(
        values[place - 1] <= values[place]
        for place, number in enumerate(numbers)
        if number.name in ("sigma_max", "max_scale")
    )
    if not (plain and fits and ordered):
        raise SpecError(f"data.augment: '{item}' {_rule(name)}")
    return tuple(values)


def _rule(name: str) -> str:
    numbers = AUGMENTATIONS[name]
    if not numbers:
        return f"must be {name} alone, without numbers"
    example = ":".join([name, *(f"{number.default:g}" for number in numbers)])
    ranges = (
        f"{number.name} {'a whole number ' if number.whole else ''}from {number.low:g} to {number.high:g}"
        for number in numbers
    )
    order = "; the last two from low to high" if name in ("gaussian_blur", "random_resized_crop") else ""
    return f"must be like {example}: {', '.join(ranges)}{order}"
