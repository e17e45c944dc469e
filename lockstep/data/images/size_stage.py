"""`data.sizes`: training images whose size depends on the epoch, as `128@0,160@6,192@12`.

Data pipeline: store → order → augment → loader; this file chooses split and augmentation of an epoch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

from lockstep.data.augment import Augment
from lockstep.data.store import Split, Store

Shape = tuple[int, int, int]


class SizedSplit(Split, Protocol):
    """A split that can give its images at another size."""

    def resized(self, size: int) -> Split:
        """The same images with so many pixels a side."""


@dataclass
class SizeStages:
    """Split and augmentation of each epoch; of one size at a time, since each may keep its pixels."""

    store: Store
    make: Callable[[Shape], Augment]
    _shape: Shape = (0, 0, 0)

    def __call__(self, epoch: int) -> tuple[Split, Augment]:
        size = next(size for first, size in reversed(self.store.sizes) if epoch >= first)
        shape = (self.store.shape[0], size, size)
        if shape != self._shape:
            split = self.store.train
            if shape != self.store.shape:
                split = cast(SizedSplit, split).resized(size)
            self._shape, self._now = shape, (split, self.make(shape))
        return self._now
