"""Image files by path: a source of encoded images, and single files that are read for a prediction.

Data pipeline: store → order → augment → loader; the splits of a folder read from such a source.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lockstep.data.decoding.batch_decoder import unreadable
from lockstep.data.decoding.decode import UNREADABLE, explain_unreadable, fit_image, measure
from lockstep.data.decoding.decode_server import read_bytes
from lockstep.errors import DataError

SUFFIXES = (".png", ".jpg", ".jpeg")
STATISTICS = {1: ((0.449,), (0.226,)), 3: ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))}
_HEADER = 1 << 16


class ImageFile(NamedTuple):
    """An image file of one class; `name` is CLASS/FILE, which does not depend on where the folder is."""

    root: str
    name: str
    label: str
    num_bytes: int
    changed_ns: int

    @property
    def path(self) -> Path:
        return Path(self.root, self.name)


class FileSource:
    """The files of a split, and the height and width of each."""

    def __init__(self, files: Sequence[ImageFile], sizes: Tensor) -> None:
        self._files, self._sizes = files, sizes

    def __len__(self) -> int:
        return len(self._files)

    def read(self, index: int) -> bytes:
        return read_bytes(self.locate(index)[0])

    def locate(self, index: int) -> tuple[str, int, int]:
        file = self._files[index]
        return f"{file.root}/{file.name}", 0, -1

    def where(self, index: int) -> str:
        return str(self._files[index].path)

    def sizes(self, ids: Tensor) -> Tensor:
        return self._sizes[ids]

    def content(self) -> str:
        digest, roots = hashlib.sha256(), {file.root for file in self._files}
        places = {root: str(Path(root).resolve()) for root in roots}
        for file in self._files:
            line = f"{places[file.root]}/{file.name}\0{file.num_bytes}\0{file.changed_ns}\n"
            digest.update(os.fsencode(line))
        return digest.hexdigest()

    def forget(self, ids: Tensor) -> None:
        for index in ids.tolist():
            drop_from_cache(self.where(index))


def drop_from_cache(path: str) -> None:
    """Ask the system to drop a file's pages, if they are written."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def measure_file(path: str) -> tuple[int, int]:
    """Height and width of an image, from its header; DataError if that cannot be read."""
    try:
        start = read_bytes(path, _HEADER)
        try:
            return measure(start)
        except UNREADABLE:
            if len(start) < _HEADER:
                raise
            return measure(read_bytes(path))  # much may stand before the size
    except UNREADABLE as error:
        raise DataError(unreadable(path, explain_unreadable(error))) from error


def read_image(path: Path, shape: tuple[int, int, int], share: float = 1.0) -> tuple[Tensor, tuple[int, int]]:
    """Decode a file to uint8 [C, H, W] of `shape`, as `fit_image` does; returns its own (H, W) too."""
    if shape[0] not in STATISTICS:
        raise DataError(f"{path}: an image file gives 1 or 3 channels, not the {shape[0]} that are wanted")
    out = np.empty(shape, np.uint8)
    try:
        data = read_bytes(str(path))
        fit_image(data, out, share)
        return torch.from_numpy(out), measure(data)
    except UNREADABLE as error:
        raise DataError(unreadable(path, explain_unreadable(error))) from error
