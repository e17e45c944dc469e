"""Decodes PNG and JPEG files: a single file, or the images of a split, kept in memory if they fit.

Data pipeline: store → order → augment → loader; the store of a folder consists of such splits.
Shapes: C channels, H rows, W columns.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import TypeVar

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from lockstep.errors import DataError

SUFFIXES = (".png", ".jpg", ".jpeg")
STATISTICS = {1: ((0.449,), (0.226,)), 3: ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))}
IN_MEMORY_BYTES = 1 << 30
_UNREADABLE = (OSError, SyntaxError, ValueError, UnidentifiedImageError, Image.DecompressionBombError)
_NUM_THREADS = min(8, os.cpu_count() or 1)  # Pillow releases the GIL while it decodes

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class ImageFile:
    """An image file of one class; `name` is CLASS/FILE, which does not depend on where the folder is."""

    path: Path
    name: str
    label: str


class FolderSplit:
    """A split that decodes files when they are read, and keeps the pixels if they fit into 1 GiB."""

    def __init__(
        self, files: Sequence[ImageFile], classes: Sequence[str], shape: tuple[int, int, int], folder: Path
    ) -> None:
        number = {name: i for i, name in enumerate(classes)}
        self._paths = [file.path for file in files]
        self.labels = torch.tensor([number[file.label] for file in files])
        self._shape, self._folder = shape, folder
        self._kept: Tensor | None = None
        if len(files) * math.prod(shape) <= IN_MEMORY_BYTES:
            self._kept = torch.empty((len(files), *shape), dtype=torch.uint8)
        self._is_kept = torch.zeros(len(files), dtype=torch.bool)

    def __len__(self) -> int:
        return len(self._paths)

    def read(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        if self._kept is None:
            return self._decode(ids), self.labels[ids]
        absent = torch.tensor(sorted(set(ids[~self._is_kept[ids]].tolist())), dtype=torch.int64)
        if len(absent):
            self._kept[absent] = self._decode(absent)
            self._is_kept[absent] = True  # set last: another thread must not read a half-written image
        return self._kept[ids], self.labels[ids]

    def _decode(self, ids: Tensor) -> Tensor:
        paths = [self._paths[i] for i in ids.tolist()]
        try:
            images = list(in_parallel(lambda path: read_image(path, self._shape)[0], paths))
        except DataError as error:
            raise DataError(
                f"{error}; `lockstep data check folder --dir {self._folder}` finds all such files; after "
                "a repair, --resume RUN --data-changed goes on"
            ) from error
        return torch.stack(images) if images else torch.empty((0, *self._shape), dtype=torch.uint8)


def in_parallel(work: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
    """Apply `work` to every item in a thread pool; results come in the order of the items."""
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        yield from pool.map(work, items)


def check_header(path: Path) -> None:
    """Refuse a file whose image header cannot be read."""
    try:
        if not S_ISREG(path.stat().st_mode):
            raise OSError("no file")  # reading a pipe or device may never end
        with Image.open(path):
            pass
    except _UNREADABLE as error:
        raise _unreadable(path, error) from error


def read_image(path: Path, shape: tuple[int, int, int]) -> tuple[Tensor, tuple[int, int]]:
    """Decode a file to uint8 [C, H, W] of `shape`, resized and centre-cropped; returns its own (H, W) too."""
    channels, height, width = shape
    if channels not in STATISTICS:
        raise DataError(f"{path}: an image file gives 1 or 3 channels, not the {channels} that are wanted")
    try:
        with Image.open(path) as file:
            upright = ImageOps.exif_transpose(file)
            plain = _as_mode(upright, "L" if channels == 1 else "RGB")
            fitted = ImageOps.fit(plain, (width, height), Image.Resampling.BILINEAR)
    except _UNREADABLE as error:
        raise _unreadable(path, error) from error
    pixels = torch.from_numpy(np.array(fitted)).view(height, width, -1).permute(2, 0, 1).contiguous()
    return pixels, (upright.height, upright.width)


def _unreadable(path: Path, error: Exception) -> DataError:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    reason = "not an image" if isinstance(error, UnidentifiedImageError) else text.replace("\n", " ")
    return DataError(f"{path}: unreadable image ({reason}): repair or remove it")


def _as_mode(image: Image.Image, mode: str) -> Image.Image:
    """Convert any mode to grey or RGB; 16-bit greys are scaled, since Pillow would clip them at 255."""
    if image.mode.startswith("I"):
        image = Image.fromarray((np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8))
    if image.mode == "P":  # a palette may hold transparency, which RGB cannot
        image = image.convert("RGBA")
    return image if image.mode == mode else image.convert(mode)
