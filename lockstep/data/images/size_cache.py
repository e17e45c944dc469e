"""Heights and widths of the images of a folder: read from their headers once, then kept for later starts.

They are kept in the user's cache folder, and hold while a file's name, size and time of change are the same.
The workers of a host share them: one reads the headers while the others wait.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lockstep.data.decoding.batch_decoder import cut_range, in_parallel
from lockstep.data.images.image_file import ImageFile, measure_file

_Arrays = dict[str, npt.NDArray[np.generic]]
_KEYS = {"names", "stats", "sizes"}
_UNKNOWN = -1


def find_sizes(files: Sequence[ImageFile]) -> Tensor:
    """Height and width of every file, int64 [N, 2]; DataError if the header of one cannot be read."""
    names = np.frombuffer("\0".join(_names(files)).encode(), np.uint8)
    stats = np.empty((len(files), 2), np.int64)
    stats[:, 0] = [file.num_bytes for file in files]
    stats[:, 1] = [file.changed_ns for file in files]
    with _locked({file.root for file in files}) as place:
        kept = _load(place)
        if kept and np.array_equal(kept["names"], names) and np.array_equal(kept["stats"], stats):
            return torch.from_numpy(kept["sizes"].astype(np.int64))
        sizes = _recall(files, kept)
        new = [i for i, (height, _) in enumerate(sizes) if height == _UNKNOWN]

        def fill(part: range) -> None:
            for place in part:
                file = files[new[place]]
                sizes[new[place]] = measure_file(f"{file.root}/{file.name}")

        for _ in in_parallel(fill, cut_range(len(new))):
            pass
        _save(place, {"names": names, "stats": stats, "sizes": sizes.astype(np.int32)})
    return torch.from_numpy(sizes)


def _names(files: Sequence[ImageFile]) -> list[str]:
    """SPLIT/CLASS/FILE of each: two splits may have files of one name."""
    splits = {root: Path(root).name for root in {file.root for file in files}}
    return [f"{splits[file.root]}/{file.name}" for file in files]


def _recall(files: Sequence[ImageFile], kept: _Arrays | None) -> npt.NDArray[np.int64]:
    """The sizes of files that have not changed, and -1 for the others."""
    sizes = np.full((len(files), 2), _UNKNOWN, np.int64)
    if kept:
        names = kept["names"].tobytes().decode().split("\0")
        known = dict(
            zip(names, zip(kept["stats"].tolist(), kept["sizes"].tolist(), strict=True), strict=True)
        )
        for index, (file, name) in enumerate(zip(files, _names(files), strict=True)):
            stat, size = known.get(name, (None, None))
            if stat == [file.num_bytes, file.changed_ns]:
                sizes[index] = size
    return sizes


@contextmanager
def _locked(roots: Iterable[str]) -> Iterator[Path | None]:
    """The file for the sizes below some folders, no other process's meanwhile; None if there can be none."""
    name = hashlib.sha256(
        "\0".join(sorted(str(Path(root).resolve()) for root in roots)).encode(errors="surrogateescape")
    ).hexdigest()[:32]
    with ExitStack() as stack:
        try:
            base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lockstep" / "sizes"
            base.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context((base / f"{name}.lock").open("wb"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        except (OSError, RuntimeError):  # no home, a full or read-only disk, one without locks
            place = None
        else:
            place = base / f"{name}.npz"
        yield place


def _load(place: Path | None) -> _Arrays | None:
    """What is kept; None if there is nothing, or it is damaged."""
    try:
        with Path(place or "").open("rb") as stream, np.load(stream) as file:
            found = {key: file[key] for key in file.files}
    except (OSError, ValueError, EOFError, BadZipFile):
        return None
    if found.keys() != _KEYS:
        return None
    count = found["names"].tobytes().count(b"\0") + 1
    return found if len(found["stats"]) == len(found["sizes"]) == count else None


def _save(place: Path | None, arrays: _Arrays) -> None:
    if place:
        part = place.with_suffix(".part.npz")
        with suppress(OSError):  # a full disk; the next start reads the headers again
            np.savez(part, names=arrays["names"], stats=arrays["stats"], sizes=arrays["sizes"])
            part.replace(place)
