"""A split of encoded images: decodes them when they are read, and keeps their pixels if they fit.

Data pipeline: store → order → augment → loader; folders and packs give such splits. Shapes: C channels, H
rows, W columns.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.data.decoding.batch_decoder import BatchDecoder, ImageSource, cut_range, in_parallel
from lockstep.data.decoding.decode import Pixels
from lockstep.data.feeding import feeding
from lockstep.data.images.pixel_cache import PixelCache, open_pixel_cache
from lockstep.data.images.view_options import View
from lockstep.data.store import MemorySplit

IN_MEMORY_BYTES = 1 << 30
_AT_ONCE = 4096  # images that are decoded together


class EncodedSplit:
    """Decodes images when they are read, and keeps their pixels if they fit into 1 GiB."""

    def __init__(self, source: ImageSource, labels: Tensor, view: View, fix: str) -> None:
        """`fix` ends the error about an image that cannot be read."""
        self.labels, self._view, self._fix = labels, view, fix
        self.source: ImageSource = source
        self._decoder = BatchDecoder(source, view, fix)
        self._kept: Tensor | None = None
        if len(source) * math.prod(view.shape) <= IN_MEMORY_BYTES:
            self._kept = torch.empty((len(source), *view.shape), dtype=torch.uint8)
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

    def resized(self, size: int) -> EncodedSplit:
        """The same images with so many pixels a side."""
        view = self._view._replace(shape=(self._view.shape[0], size, size))
        return EncodedSplit(self.source, self.labels, view, self._fix)

    def read_by(self, source: ImageSource) -> EncodedSplit:
        """The same images from another source."""
        return EncodedSplit(source, self.labels, self._view, self._fix)

    @property
    def is_kept(self) -> bool:
        """Whether pixels stay in memory once they are decoded."""
        return self._kept is not None

    def in_memory(self) -> MemorySplit:
        """The whole split, decoded; its pixels must fit."""
        assert self._kept is not None
        for first in range(0, len(self), _AT_ONCE):
            self.read(torch.arange(first, min(first + _AT_ONCE, len(self))))
        return MemorySplit(self._kept, self.labels)

    def sizes(self, ids: Tensor) -> Tensor:
        """Height and width of images in their files, int64 [N, 2]."""
        return self.source.sizes(ids)

    def read_boxes(self, ids: Tensor, boxes: Tensor) -> tuple[Tensor, Tensor]:
        """A box of each image (int64 [N, 4]: top, left, height, width), resized to the shape."""
        return self.decode(ids, boxes.tolist()), self.labels[ids]

    def decode(self, ids: Tensor, boxes: Sequence[tuple[int, int, int, int]] | None = None) -> Tensor:
        """Images, or a box of each, from their bytes; whole ones from the cache on disk, if there is one."""
        numbers, store = ids.tolist(), None if boxes else self._cache()
        if not store:
            return self._decoder.decode(numbers, boxes)
        images = torch.empty((len(numbers), *self._view.shape), dtype=torch.uint8)
        pixels: Pixels = images.numpy()

        def read(part: range) -> list[int]:
            return [place for place in part if not store.read(numbers[place], pixels[place])]

        absent = [place for part in in_parallel(read, cut_range(len(numbers))) for place in part]
        if absent:
            images[absent] = self._decoder.decode([numbers[place] for place in absent], None)
            for place in absent:
                store.write(numbers[place], pixels[place])
        return images

    def _cache(self) -> PixelCache | None:
        """The cache for fitted images, opened when they are first read."""
        if not feeding().cache:
            return None
        with self._lock:
            if not self._caches:
                self._caches.append(open_pixel_cache(self.source.content(), len(self), self._view))
        return self._caches[0]
