"""What is known of the training images of a folder or a pack before anything is decided about a run."""

from __future__ import annotations

from typing import NamedTuple

import torch

from lockstep.data.images.encoded_split import EncodedSplit
from lockstep.data.pack.raw_split import RawSplit
from lockstep.data.store import Store

_LOOKED_AT = 64  # images that are decoded to see whether all are grey


class ImageFacts(NamedTuple):
    """Of training images alone; `side` is the median of their shorter sides, in pixels.

    Images with rows of values count as one class.
    """

    num_train: int
    num_classes: int
    side: int
    channels: int

    def __str__(self) -> str:
        classes = f" of {self.num_classes} classes" if self.num_classes > 1 else ""
        grey = "grey " if self.channels == 1 else ""
        return f"{self.num_train:,} {grey}images{classes}, about {self.side} pixels"


def measure_images(store: Store) -> ImageFacts:
    """Look at the sizes of all training images and the colours of some; a pack has those of its folder."""
    split = store.train
    assert isinstance(split, EncodedSplit | RawSplit), "asked of folders and packs"
    sides = split.sizes(torch.arange(len(split))).min(1).values
    classes = 1 if store.has_values else len(store.classes)
    return ImageFacts(len(split), classes, int(sides.median()), _count_channels(split, store))


def _count_channels(split: EncodedSplit | RawSplit, store: Store) -> int:
    channels = store.shape[0]
    if channels == 1 or not isinstance(split, EncodedSplit):
        return channels
    images = split.decode(torch.linspace(0, len(split) - 1, min(len(split), _LOOKED_AT)).long())
    return 1 if bool((images == images[:, :1]).all()) else channels
