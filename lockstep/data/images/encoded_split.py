"""A split of encoded images: decodes them in threads when they are read, and keeps them if they fit.

Data pipeline: store → order → augment → loader; folders and packs give such splits. Shapes: C channels, H
rows, W columns.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from lockstep.data.feeding import feeding
from lockstep.data.images.decode import (
    UNREADABLE,
    Encoded,
    Pixels,
    cut_image,
    explain_unreadable,
    fit_image,
)
from lockstep.data.images.decode_processes import BadImage, Place, find_decoders
from lockstep.data.images.view_options import View
from lockstep.data.store import MemorySplit
from lockstep.errors import DataError

IN_MEMORY_BYTES = 1 << 30
_AT_ONCE = 4096  # images that are decoded together
_FOR_PROCESSES = 2048  # images at least: processes take a third of a second to start
_MANY_THREADS = 4  # which get in each other's way
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

    def forget(self, ids: Tensor) -> None:
        """Ask the system to drop images from its cache, so that they are read from the disk next."""


@runtime_checkable
class LocatedSource(Protocol):
    """Encoded images in files."""

    def locate(self, index: int) -> Place:
        """The file, and where in it the image begins and how long it is; -1: all of it."""


class EncodedSplit:
    """Decodes images when they are read, and keeps their pixels if they fit into 1 GiB."""

    def __init__(self, source: ImageSource, labels: Tensor, view: View, fix: str) -> None:
        """`fix` ends the error about an image that cannot be read."""
        self.labels, self.source, self._view, self._fix = labels, source, view, fix
        self._kept: Tensor | None = None
        if len(source) * math.prod(view.shape) <= IN_MEMORY_BYTES:
            self._kept = torch.empty((len(source), *view.shape), dtype=torch.uint8)
        self._is_kept = torch.zeros(len(source), dtype=torch.bool)

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
        """Images, or a box of each, anew from their bytes."""
        numbers = ids.tolist()
        if self._by_processes():
            return self._decode_by_processes(numbers, boxes)
        images = torch.empty((len(numbers), *self._view.shape), dtype=torch.uint8)
        pixels: Pixels = images.numpy()
        there = self._decode_on_gpu(numbers, boxes, images) if self._view.decoder == "nvjpeg" else set()

        def fill(part: range) -> None:
            for place in part:
                if place not in there:
                    self._fill(numbers[place], boxes[place] if boxes else None, pixels[place])

        for _ in in_parallel(fill, cut_range(len(numbers))):
            pass
        return images

    def _by_processes(self) -> bool:
        many = feeding().threads >= _MANY_THREADS and len(self) >= _FOR_PROCESSES
        return many and self._view.decoder == "cpu" and isinstance(self.source, LocatedSource)

    def _decode_by_processes(
        self, numbers: list[int], boxes: Sequence[tuple[int, int, int, int]] | None
    ) -> Tensor:
        assert isinstance(self.source, LocatedSource)
        places = [self.source.locate(number) for number in numbers]
        try:
            return find_decoders(os.getpid(), feeding().threads).decode(places, boxes, self._view)
        except BadImage as error:
            where = self.source.where(numbers[error.slot])
            raise DataError(f"{unreadable(where, str(error))}; {self._fix}") from error

    def _decode_on_gpu(
        self, numbers: list[int], boxes: Sequence[tuple[int, int, int, int]] | None, images: Tensor
    ) -> set[int]:
        """Decode what a GPU can; returns which places of the batch are done."""
        from lockstep.data.images.nvjpeg import find_nvjpeg

        gpu = find_nvjpeg()

        def read(part: range) -> list[bytes]:
            return [self._read(numbers[place]) for place in part]

        files = [data for part in in_parallel(read, cut_range(len(numbers))) for data in part]
        coded = {place: found for place, data in enumerate(files) if (found := gpu.parse(data))}
        places = list(coded)
        own = [boxes[place] if boxes else None for place in places]
        out = images if len(places) == len(images) else images[: len(places)].clone()
        gpu.decode(list(coded.values()), own, out, self._view.share)
        if out is not images:
            images[places] = out
        return set(places)

    def _read(self, index: int) -> bytes:
        try:
            return bytes(self.source.read(index))
        except OSError:
            return b""  # which is told when the host reads it

    def _fill(self, index: int, box: tuple[int, int, int, int] | None, out: Pixels) -> None:
        try:
            data = self.source.read(index)
            if box:
                cut_image(data, box, out)
            else:
                fit_image(data, out, self._view.share)
        except UNREADABLE as error:
            where = self.source.where(index)
            raise DataError(f"{unreadable(where, explain_unreadable(error))}; {self._fix}") from error


def unreadable(where: object, reason: str) -> str:
    """One line for an image that cannot be read."""
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
