"""Decodes a batch of encoded images: by threads, by processes where cores are many, or by a GPU.

Which of the first two it is changes no bit. Shapes: C channels, H rows, W columns.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from lockstep.data.decoding.decode import (
    UNREADABLE,
    Encoded,
    Pixels,
    cut_image,
    explain_unreadable,
    fit_image,
)
from lockstep.data.decoding.decode_processes import BadImage, Box, Place, find_decoders
from lockstep.data.feeding import feeding
from lockstep.data.images.view_options import View
from lockstep.errors import DataError

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

    def content(self) -> str:
        """A hash of what identifies the images and their order: of files names, sizes and times."""

    def forget(self, ids: Tensor) -> None:
        """Ask the system to drop images from its cache, so that they are read from the disk next."""


@runtime_checkable
class LocatedSource(Protocol):
    """Encoded images in files."""

    def locate(self, index: int) -> Place:
        """The file, and where in it the image begins and how long it is; -1: all of it."""


class BatchDecoder:
    """Decodes images of a source to a view; `fix` ends the error about one that cannot be read."""

    def __init__(self, source: ImageSource, view: View, fix: str) -> None:
        self._source, self._view, self._fix = source, view, fix

    def decode(self, numbers: Sequence[int], boxes: Sequence[Box] | None) -> Tensor:
        """Images, or a box of each, as uint8 [N, C, H, W]."""
        many = feeding().threads >= _MANY_THREADS and len(self._source) >= _FOR_PROCESSES
        if many and self._view.decoder == "cpu" and isinstance(self._source, LocatedSource):
            return self._decode_by_processes([self._source.locate(i) for i in numbers], numbers, boxes)
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

    def _fill(self, index: int, box: Box | None, out: Pixels) -> None:
        try:
            data = self._source.read(index)
            if box:
                cut_image(data, box, out)
            else:
                fit_image(data, out, self._view.share)
        except UNREADABLE as error:
            raise self._error(index, explain_unreadable(error)) from error

    def _decode_by_processes(
        self, places: Sequence[Place], numbers: Sequence[int], boxes: Sequence[Box] | None
    ) -> Tensor:
        try:
            return find_decoders(os.getpid(), feeding().threads).decode(places, boxes, self._view)
        except BadImage as error:
            raise self._error(numbers[error.slot], str(error)) from error

    def _decode_on_gpu(self, numbers: Sequence[int], boxes: Sequence[Box] | None, images: Tensor) -> set[int]:
        """Decode what a GPU can; returns which places of the batch are done."""
        from lockstep.data.decoding.nvjpeg import find_nvjpeg

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
            return bytes(self._source.read(index))
        except OSError:
            return b""  # which is told when the host reads it

    def _error(self, index: int, reason: str) -> DataError:
        return DataError(f"{unreadable(self._source.where(index), reason)}; {self._fix}")


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
