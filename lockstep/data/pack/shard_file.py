"""Writes one shard: a tar file in WebDataset's convention, or a NumPy array of raw pixels.

The bytes depend on the images alone: every member of a tar file has the same time, owner and mode.
"""

from __future__ import annotations

import os
import tarfile
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy

from lockstep.data.pack.image_form import PackedImage
from lockstep.data.pack.pack_facts import INDEX_TYPE

_BLOCK = tarfile.BLOCKSIZE


def sync_names(folder: Path) -> None:
    """Make the names of files in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_file(stream: IO[bytes]) -> None:
    """Make what was written to a file durable."""
    stream.flush()
    os.fsync(stream.fileno())


def remove_unfinished(folder: Path) -> None:
    """Remove the files that are not whole: a ShardFile may have been interrupted as it was made."""
    for path in folder.glob("*.tmp"):
        path.unlink(missing_ok=True)


class ShardFile:
    """A shard that is being written, under a name of its own until it is whole; `shape` is that of pixels."""

    def __init__(self, folder: Path, split: str, number: int, shape: tuple[int, int, int] | None) -> None:
        self.path = folder / f"{split}-{number:06d}.{'npy' if shape else 'tar'}"
        self._temporary = self.path.with_name(f"{self.path.name}.tmp")
        self._stream = self._temporary.open("wb")
        self._number, self._shape = number, shape
        self._rows: list[tuple[int, ...]] = []
        self.num_bytes = 0
        if shape:
            self._write_npy_header()
            self.num_bytes = self._stream.tell()

    def add(self, key: int, image: PackedImage, label: int) -> None:
        """Append a sample; in a tar file, `key` is its name."""
        if not self._shape:
            self._write(_header(f"{key:09d}.{image.suffix}", len(image.data)))
        offset = self.num_bytes
        self._write(image.data)
        if not self._shape:
            text = str(label).encode()
            self._write(b"\0" * (-len(image.data) % _BLOCK) + _header(f"{key:09d}.cls", len(text)))
            self._write(text.ljust(_BLOCK, b"\0"))
        self._rows.append((self._number, label, image.height, image.width, offset, len(image.data)))

    def finish(self) -> np.ndarray[Any, np.dtype[np.void]]:
        """Make the shard durable under its name; gives its part of the index."""
        if self._shape:
            self._stream.seek(0)
            self._write_npy_header()
        else:
            self._write(b"\0" * (2 * _BLOCK))
        sync_file(self._stream)
        self._stream.close()
        self._temporary.replace(self.path)
        return np.array(self._rows, dtype=INDEX_TYPE)

    def abandon(self) -> None:
        """Remove what was written."""
        self._stream.close()
        self._temporary.unlink(missing_ok=True)

    def _write(self, data: bytes) -> None:
        self._stream.write(data)
        self.num_bytes += len(data)

    def _write_npy_header(self) -> None:
        """NumPy leaves room in a header for the number of images to grow, so its length never changes."""
        shape = (len(self._rows), *(self._shape or ()))
        npy.write_array_header_1_0(self._stream, {"descr": "|u1", "fortran_order": False, "shape": shape})


def _header(name: str, size: int) -> bytes:
    member = tarfile.TarInfo(name)
    member.size = size
    member.mode = 0o644
    return member.tobuf(tarfile.USTAR_FORMAT)
