"""Decoded, resized pixels of a split in one file on a local disk: `--pixel-cache DIR --pixel-cache-gb N`.

The file's name is a hash of what its pixels depend on: the images, the decoder, the shape. It has a slot for
each image: pixels, then a checksum over them and the image's number. A slot that was never written, or only
in part, has another checksum and is decoded anew, so processes may be killed at any moment, and several may
write one file: they write the same bytes. Files that no process uses are removed where space is needed, the
one that was used longest ago first.
"""

from __future__ import annotations

import fcntl
import hashlib
import math
import os
import weakref
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lockstep.data.decoding.decode import Pixels
from lockstep.data.decoding.decode_fingerprint import decode_fingerprint
from lockstep.data.feeding import PixelSpace, feeding
from lockstep.data.images.view_options import View

_SUM = 8  # bytes of a checksum
_WRITTEN = 1 << 32  # so that no checksum is 0, which an empty slot has


def open_pixel_cache(content: str, count: int, view: View) -> PixelCache | None:
    """The file for `count` images of a split, as far as they fit; None if there is no room, or no cache."""
    space = feeding().cache
    if not space:
        return None
    shape, decoder = view.shape, decode_fingerprint(view.decoder)
    told = f"{content}\0{decoder}\0{shape}\0{view.share}\0{count}"
    path = space.folder / f"{hashlib.sha256(told.encode()).hexdigest()[:32]}.pixels"
    try:
        with _locked(space.folder):
            fd = _take_file(path, space, count * slot_bytes(shape), slot_bytes(shape))
    except OSError:  # a full disk, or one without locks
        return None
    return None if fd is None else PixelCache(fd, shape)


def slot_bytes(shape: tuple[int, int, int]) -> int:
    """What an image takes in the file."""
    return math.prod(shape) + _SUM


class PixelCache:
    """The slots of a file; reading and writing one may fail, and nothing depends on it."""

    def __init__(self, fd: int, shape: tuple[int, int, int]) -> None:
        self._fd, self._slot = fd, slot_bytes(shape)
        weakref.finalize(self, os.close, fd)
        self._is_full = False
        self.count = os.fstat(fd).st_size // self._slot

    def read(self, index: int, out: Pixels) -> bool:
        """Copy an image to `out`; False if it is not there, or damaged."""
        if index >= self.count:
            return False
        stored = bytearray(_SUM)
        try:  # not by a memory map: a file that is cut, or a hole on a full tmpfs, would end us
            count = os.preadv(self._fd, [out.reshape(-1).data, stored], index * self._slot)
        except OSError:
            return False
        return count == self._slot and int.from_bytes(stored, "little") == _checksum(out, index)

    def write(self, index: int, pixels: Pixels) -> None:
        """Keep an image; if the disk is full, this one and later ones are not kept."""
        if index < self.count and not self._is_full:
            data = pixels.tobytes() + _checksum(pixels, index).to_bytes(_SUM, "little")
            try:
                os.pwrite(self._fd, data, index * self._slot)  # not by the map: a full disk would end us
            except OSError:
                self._is_full = True


def _checksum(pixels: Pixels, index: int) -> int:
    return zlib.crc32(pixels.reshape(-1).data, index & 0xFFFFFFFF) | _WRITTEN


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """No other process takes or removes files meanwhile."""
    with (folder / "lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _take_file(path: Path, space: PixelSpace, wanted: int, slot: int) -> int | None:
    """Open the file, or make it as large as there is room; while it is open, it counts as used."""
    files = {each: each.stat() for each in space.folder.glob("*.pixels")}
    others = {each: found.st_size for each, found in files.items() if each != path}
    oldest = sorted(others, key=lambda each: files[each].st_mtime_ns)
    while oldest and sum(others.values()) + wanted > space.num_bytes:
        if _remove(each := oldest.pop(0)):
            del others[each]
    room = space.num_bytes - sum(others.values())
    if path in files and files[path].st_size > room and not _remove(path):
        return None  # others use it, and it is larger than what is allowed here
    size = min(wanted, room) // slot * slot
    if size <= 0:
        return None
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    fcntl.flock(fd, fcntl.LOCK_SH)
    if os.fstat(fd).st_size < size:
        os.ftruncate(fd, size)  # takes no space until slots are written
    os.utime(fd)
    return fd


def _remove(path: Path) -> bool:
    """Remove a file that no process uses."""
    with suppress(OSError), path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
        return True
    return False
