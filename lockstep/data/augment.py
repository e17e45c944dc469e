"""Augments a batch: random boxes, changes, flip, crop, cutout, normalization, by seed, epoch and sample.

Data pipeline: store → order → augment → loader. A random box is all that is read of an image; `changes` then
work on its bytes. Flip and crop only move pixels, so one gather over the raw images does both. Normalization
converts them to floats, and cutout zeroes a square of the result. Shapes: N images, C channels, H, W pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lockstep.data.changes import Changes
from lockstep.data.changes.own_change import OwnChange, OwnFunction
from lockstep.data.class_labels import read_labels
from lockstep.data.images.random_box import read_random_boxes
from lockstep.data.order import ClassOrder, sample_ids
from lockstep.data.sample_mix import SampleMix
from lockstep.data.store import Split, Store
from lockstep.errors import DataError
from lockstep.kernels import random
from lockstep.spec import Run
from lockstep.spec.sample.augmentation import CHANGES, CROPS, mixes, read_numbers
from lockstep.spec.sample.sample_order import BALANCED, find_block

_DRAWS = ("crop-row", "crop-col", "flip", "cutout-row", "cutout-col")


@dataclass(frozen=True)
class Augment:
    """A run's augmentations, and the mean and standard deviation that normalize its images."""

    seed: int
    flip: bool
    crop_padding: int
    cutout: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    box_area: tuple[float, float] | None = None  # least and largest share of an image in a random box
    changes: Changes | None = None
    mix: SampleMix | None = None
    block: int = 0  # neighbours that are shuffled together: see `sample_ids`
    repeats: int = 1  # of a sample in an epoch: see `sample_ids`
    own: OwnChange | None = None
    classes: ClassOrder | None = None  # if the order gives every class as often as any other

    @classmethod
    def parse(
        cls, names: Sequence[str], seed: int, size: int, mean: tuple[float, ...], std: tuple[float, ...]
    ) -> Augment:
        """Read names such as `flip`, `crop`, `crop:4`, `cutout:8`; the default is a fraction of `size`."""
        pixels = dict.fromkeys(("flip", "crop", "cutout"), 0)
        defaults = {"flip": 1, "crop": max(size // 8, 1), "cutout": max(size // 4, 1)}
        area = None
        for item in names:
            name, _, number = item.partition(":")
            if name in pixels:
                pixels[name] = int(number) if number else defaults[name]
            elif name in CROPS:
                low, high = read_numbers(item)
                area = low, high
        moves = bool(pixels["flip"]), pixels["crop"], pixels["cutout"]
        return cls(seed, *moves, mean, std, area, Changes.parse(names, seed, mean))

    @property
    def is_drawn_before(self) -> bool:
        """Whether images change from epoch to epoch already before flip, crop and cutout."""
        return any(part is not None for part in (self.box_area, self.changes, self.own))

    @property
    def repeats_samples(self) -> bool:
        """Whether a sample may be in an epoch several times."""
        return self.repeats > 1 or self.classes is not None

    def order(self, epoch: int, positions: Tensor, length: int) -> Tensor:
        """The numbers of the samples at some positions of an epoch, of `length` samples."""
        if self.classes:
            return self.classes.ids(epoch, positions)
        return sample_ids(self.seed, epoch, positions, length, self.block, self.repeats)

    def read(self, split: Split, ids: Tensor, epoch: int) -> tuple[Tensor, Any]:
        """Training images, or random boxes of them, changed by the user's function, and their targets.

        Here and below, `ids` are the numbers of `sample_ids`.
        """
        if self.box_area is None:
            images, targets = split.read(ids % len(split))
        else:
            images, targets = read_random_boxes(split, ids, self.seed, epoch, self.box_area)
        return self.own.apply(images, ids, epoch) if self.own else images, targets

    def change(self, images: Tensor, ids: Tensor, epoch: int) -> Tensor:
        """Change colours, geometry and regions of training images of bytes; `ids` are on the host."""
        return self.changes.apply(images, ids, epoch) if self.changes else images

    def apply(self, images: Tensor, ids: Tensor, epoch: int) -> Tensor:
        """Flip and crop, then normalize, then cut out a batch of training images."""
        if self.flip or self.crop_padding:
            images = self._move(images, ids, epoch)
        images = self.normalize(images)
        return self._cut_out(images, ids, epoch) if self.cutout else images

    def normalize(self, images: Tensor) -> Tensor:
        """Convert images to float32 and normalize each channel; bytes are first scaled to 0 to 1."""
        scale, shift = self.normal(images)
        return images.to(torch.float32) * scale.view(-1, 1, 1) - shift.view(-1, 1, 1)

    def normal(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Scale and shift of each channel: a normalized pixel is pixel · scale − shift."""
        unit = 255.0 if images.dtype == torch.uint8 else 1.0
        scale = torch.tensor([1.0 / (unit * s) for s in self.std], device=images.device)
        shift = torch.tensor([m / s for m, s in zip(self.mean, self.std, strict=True)], device=images.device)
        return scale, shift

    def keys(self, epoch: int) -> list[int]:
        """The random-number keys of an epoch, one for each kind of draw."""
        return [self._key(what, epoch) for what in _DRAWS]

    def _key(self, what: str, epoch: int) -> int:
        return random.key("augment", self.seed, epoch, what)

    def _move(self, images: Tensor, ids: Tensor, epoch: int) -> Tensor:
        """Mirror and shift with one gather; pixels from outside the image are 0."""
        height, width = images.shape[2:]
        rows = torch.arange(height, device=images.device).expand(len(ids), -1)
        cols = torch.arange(width, device=images.device).expand(len(ids), -1)
        if self.crop_padding:
            span = 2 * self.crop_padding + 1
            rows = rows + (self._draw("crop-row", ids, epoch, span) - self.crop_padding)[:, None]
            cols = cols + (self._draw("crop-col", ids, epoch, span) - self.crop_padding)[:, None]
        if self.flip:
            mirrored = self._draw("flip", ids, epoch, 2).bool()[:, None]
            cols = torch.where(mirrored, width - 1 - cols, cols)
        inside = ((rows >= 0) & (rows < height))[:, :, None] & ((cols >= 0) & (cols < width))[:, None, :]
        source = rows.clamp(0, height - 1)[:, :, None] * width + cols.clamp(0, width - 1)[:, None, :]
        index = source.flatten(1)[:, None, :].expand(-1, images.shape[1], -1)
        moved = images.flatten(2).gather(2, index).view_as(images)
        return moved * inside[:, None].to(images.dtype)

    def _cut_out(self, images: Tensor, ids: Tensor, epoch: int) -> Tensor:
        height, width = images.shape[2:]
        top = self._draw("cutout-row", ids, epoch, height) - self.cutout // 2
        left = self._draw("cutout-col", ids, epoch, width) - self.cutout // 2
        rows = torch.arange(height, device=images.device)[None, :] - top[:, None]
        cols = torch.arange(width, device=images.device)[None, :] - left[:, None]
        hole = ((rows >= 0) & (rows < self.cutout))[:, :, None] & ((cols >= 0) & (cols < self.cutout))[
            :, None
        ]
        return images.masked_fill(hole[:, None], 0.0)

    def _draw(self, what: str, ids: Tensor, epoch: int, bound: int) -> Tensor:
        return random.integers(self._key(what, epoch), ids, bound)


def check_augment(run: Run, store: Store, own: OwnFunction | None = None) -> None:
    """Refuse augmentations and a normalization that the images or targets of a data set cannot have."""
    if run.data.normalize and "sample_sha256" in store.manifest:
        what = "is for data sets by name: normalize images of your own yourself, and give floats"
        raise DataError(f"data.normalize={run.data.normalize}: {what}")
    if own is not None and not callable(own):
        raise DataError(f"augment={own!r}: give a function of (image, generator) that gives an image")
    own_item = [f"augment={getattr(own, '__name__', type(own).__name__)}"] if own else []
    named = ",".join(run.data.augment)
    items = " and ".join([*([f"data.augment={named}"] if named else []), *own_item])
    if run.data.repeats > 1 and not items:
        raise DataError(
            f"data.repeats={run.data.repeats} without data.augment gives the same images again: set "
            "data.augment, or data.repeats=1"
        )
    if items and store.has_masks:
        raise DataError(
            f"{items} moves the pixels of an image, and the targets of {store.name} lie on them and would "
            "stay: leave it out"
        )
    if run.data.order == BALANCED and (not store.classes or store.has_values):
        raise DataError(
            f"data.order=balanced: {store.name} has no classes to balance: set data.order=shuffled"
        )
    if mixed := mixes(run.data.augment):
        if not store.classes or store.has_values:
            raise DataError(f"data.augment={mixed} mixes labels, and the targets of {store.name} are none")
        if min(stage.batch for stage in run.train.stages) == run.train.lanes:
            raise DataError(f"data.augment={mixed} needs two samples a lane: raise train.batch")
    changes = [item for item in run.data.augment if item.partition(":")[0] in {**CHANGES, **CROPS}]
    others = [*(f"data.augment={item}" for item in changes), *own_item]
    if others and getattr(store.train, "dtype", torch.uint8) != torch.uint8:
        raise DataError(f"{others[0]} works on bytes, and the images of {store.name} are floats: give uint8")


def make_augment(
    run: Run,
    shape: tuple[int, int, int],
    mean: tuple[float, ...],
    std: tuple[float, ...],
    own: OwnFunction | None = None,
    train: Split | None = None,
) -> Augment:
    """What a Run asks for, for images of `shape`; an order by class needs the labels of `train`."""
    augment = Augment.parse(run.data.augment, run.seed, min(shape[1:]), mean, std)
    mix = SampleMix.parse(run.data.augment, run.seed, shape[1:])
    change = OwnChange(own, run.seed) if own else None
    block, repeats = find_block(run.data.order), run.data.repeats
    classes = None
    if train is not None and run.data.order == BALANCED:
        classes = ClassOrder(run.seed, read_labels(train))
    return replace(augment, mix=mix, block=block, repeats=repeats, own=change, classes=classes)
