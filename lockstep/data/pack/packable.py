"""`Packable`: what can be packed: splits of samples, each an encoded image or pixels, with its label."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lockstep.data.decoding.decode import Pixels


@dataclass(frozen=True)
class PackableSplit:
    """Samples in their order. `read` is called by several threads; `where` names a sample in errors."""

    labels: npt.NDArray[np.int64]
    names: Sequence[str]
    read: Callable[[int], bytes | Pixels]  # an image file's bytes, or pixels [H, W, C]
    where: Callable[[int], str]
    num_bytes: int  # of all images, as they are read

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Packable:
    """A whole source. `identity` is the hash of its content that a pack tells; `state` may know times too."""

    classes: tuple[str, ...]
    splits: dict[str, PackableSplit]
    identity: str
    state: str
    folder: Path | None = None  # of class folders, whose names and sizes identify it
    pixels: tuple[int, int, int] | None = None  # H W C, if samples are pixels
    channels: int = 3  # of raw pixels
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    warnings: tuple[str, ...] = ()


def digest_lines(lines: Iterable[str]) -> str:
    """One hash over lines of text."""
    digest = hashlib.sha256()
    for line in lines:
        digest.update(f"{line}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


def digest_files(paths: Iterable[Path]) -> tuple[str, str]:
    """(identity, state) of a source of a few large files: their names and sizes; and their times."""
    found = [(path.name, path.stat()) for path in paths]
    identity = digest_lines(f"{name}\t{stat.st_size}" for name, stat in found)
    return identity, digest_lines([identity, *(str(stat.st_mtime_ns) for _, stat in found)])
