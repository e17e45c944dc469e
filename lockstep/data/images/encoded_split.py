"""A split of encoded images: decodes them in threads when they are read, and keeps them if they fit.

Data pipeline: store → order → augment → loader; folders and packs give such splits. Shapes: C channels, H
rows, W columns.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Protocol, TypeVar

import numpy as np
import torch
from PIL import UnidentifiedImageError
from torch import Tensor

from lockstep.data.feeding import feeding
from lockstep.data.images.decode import UNREADABLE, Encoded, Pixels, cut_image, fit_image
from lockstep.data.images.pixel_cache import PixelCache, open_pixel_cache
from lockstep.data.store import MemorySplit
from lockstep.errors import DataError

IN_MEMORY_BYTES = 1 << 30
_CHUNKS = 4  # of a batch for every thread: images differ in size

T = TypeVar("T")
R = TypeVar("R")


class ImageSource(Protocol):
    """Encoded images by number."""

    def __len__(self) -> int: ...

    def read(self, index: int) -> Encoded:
        """The bytes of an image file."""

    def where(self, index: int) -> str:
        """Where it is, for errors."""

    def sizes(self, ids: Tensor) -> Tensor:
        """Height and width of images, int64 [N, 2]."""

    def content(self) -> str:
        """A hash of what identifies the images and their order: of files names, sizes and times."""

    def forget(self, ids: Tensor) -> None:
        """Ask the system to drop images from its cache, so that they are read from the disk next."""


class EncodedSplit:
    """Decodes images when they are read, and keeps their pixels if they fit into 1 GiB."""

    def __init__(self, source: ImageSource, labels: Tensor, shape: tuple[int, int, int], fix: str) -> None:
        """`fix` ends the error about an image that cannot be read."""
        self.labels = labels
        self.source: ImageSource = source
        self._shape, self._fix = shape, fix
        self._kept: Tensor | None = None
        if len(source) * math.prod(shape) <= IN_MEMORY_BYTES:
            self._kept = torch.empty((len(source), *shape), dtype=torch.uint8)
        self._is_kept = torch.zeros(len(source), dtype=torch.bool)
        self._lock, self._caches = threading.Lock(), list[PixelCache | None]()

    def __len__(self) -> int:
        return len(self.source)

    def read(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Images that are fitted to the shape, and their labels."""
        if self._kept is None:
            return self.decode(ids), self.labels[ids]
        absent = torch.tensor(sorted(set(ids[~self._is_kept[ids]].tolist())), dtype=torch.int64)
        if len(absent):
            self._kept[absent] = self.decode(absent)
            self._is_kept[absent] = True  # set last: another thread must not read a half-written image
        return self._kept[ids], self.labels[ids]

    @property
    def is_kept(self) -> bool:
        """Whether pixels stay in memory once they are decoded."""
        return self._kept is not None

    def in_memory(self) -> MemorySplit:
        """The whole split, decoded."""
        return MemorySplit(*self.read(torch.arange(len(self))))

    def sizes(self, ids: Tensor) -> Tensor:
        """Height and width of images in their files, int64 [N, 2]."""
        return self.source.sizes(ids)

    def read_boxes(self, ids: Tensor, boxes: Tensor) -> tuple[Tensor, Tensor]:
        """A box of each image (int64 [N, 4]: top, left, height, width), resized to the shape."""
        return self.decode(ids, boxes.tolist()), self.labels[ids]

    def decode(self, ids: Tensor, boxes: Sequence[tuple[int, int, int, int]] | None = None) -> Tensor:
        """Images, or a box of each, anew from their bytes."""
        numbers = ids.tolist()
        images = torch.empty((len(numbers), *self._shape), dtype=torch.uint8)
        pixels: Pixels = images.numpy()
        cache = None if boxes else self._cache()

        def fill(part: range) -> None:
            for place in part:
                if cache and cache.read(numbers[place], pixels[place]):
                    continue
                self._fill(numbers[place], boxes[place] if boxes else None, pixels[place])
                if cache:
                    cache.write(numbers[place], pixels[place])

        for _ in in_parallel(fill, cut_range(len(numbers))):
            pass
        return images

    def _cache(self) -> PixelCache | None:
        """The cache for fitted images, opened when they are first read."""
        if not feeding().cache:
            return None
        with self._lock:
            if not self._caches:
                self._caches.append(open_pixel_cache(self.source.content(), len(self), self._shape))
        return self._caches[0]

    def _fill(self, index: int, box: tuple[int, int, int, int] | None, out: Pixels) -> None:
        try:
            data = self.source.read(index)
            if box:
                cut_image(data, box, out)
            else:
                fit_image(data, out)
        except UNREADABLE as error:
            raise DataError(f"{unreadable(self.source.where(index), error)}; {self._fix}") from error


def unreadable(where: object, error: Exception) -> str:
    """One line for an image that cannot be read."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    reason = "not an image" if isinstance(error, UnidentifiedImageError) else text.replace("\n", " ")
    return f"{where}: unreadable image ({reason}): repair or remove it"


def cut_range(count: int) -> list[range]:
    """Consecutive parts of a batch, some for every thread."""
    ends = np.linspace(0, count, min(count, _CHUNKS * feeding().threads) + 1).astype(int).tolist()
    return [range(first, last) for first, last in pairwise(ends)]


def in_parallel(work: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
    """Apply `work` to every item in threads; results come in the order of the items."""
    if len(items) == 1:
        return iter([work(items[0])])
    return _threads(os.getpid(), feeding().threads).map(work, items)


@cache
def _threads(process: int, count: int) -> ThreadPoolExecutor:
    """The threads of a process, which a fork does not inherit; decoders release the interpreter's lock."""
    return ThreadPoolExecutor(count, f"lockstep-decode-{process}")
