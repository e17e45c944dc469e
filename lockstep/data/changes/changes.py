"""The changes that a run asks for, in their fixed order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from lockstep.data.changes.blur import gaussian_blur
from lockstep.data.changes.color_jitter import color_jitter, grayscale
from lockstep.data.changes.erasing import random_erasing
from lockstep.data.changes.policy import rand_augment, trivial_augment
from lockstep.data.changes.sample_draw import SampleDraw
from lockstep.spec.sample.augmentation import CHANGES, read_numbers

_STEPS: dict[str, Callable[..., Tensor]] = {
    "rand_augment": rand_augment,
    "trivial_augment": trivial_augment,
    "color_jitter": color_jitter,
    "grayscale": grayscale,
    "gaussian_blur": gaussian_blur,
}


@dataclass(frozen=True)
class Changes:
    """Names of changes with their numbers, the seed, and the colour of erased regions."""

    seed: int
    numbers: dict[str, tuple[float, ...]]
    fill: tuple[int, ...]

    @classmethod
    def parse(cls, items: Sequence[str], seed: int, mean: tuple[float, ...]) -> Changes | None:
        """The changes among the items of `data.augment`, or None; `mean` is that of pixels from 0 to 1."""
        named = ((item.partition(":")[0], item) for item in items)
        numbers = {name: read_numbers(item) for name, item in named if name in CHANGES}
        return cls(seed, numbers, tuple(round(255 * part) for part in mean)) if numbers else None

    def apply(self, images: Tensor, ids: Tensor, epoch: int) -> Tensor:
        """Change a batch of uint8 images [N, C, H, W]; ids on the host spare a wait for the device."""
        if not len(images):
            return images
        images, draw = images.contiguous(), SampleDraw(self.seed, epoch, ids.cpu())
        for name, step in _STEPS.items():
            if name in self.numbers:
                images = step(images, draw, *self.numbers[name])
        if "random_erasing" in self.numbers:
            images = random_erasing(images, draw, self.fill, *self.numbers["random_erasing"])
        return images
