"""Tar shards of others as a source of packs, in WebDataset's convention: KEY.jpg with KEY.cls or .json."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np

from lockstep.data.images.image_file import SUFFIXES
from lockstep.data.pack.numbered import check_classes, files_by_split, hold_out
from lockstep.data.pack.packable import Packable, PackableSplit, digest_files
from lockstep.errors import DataError


@dataclass(frozen=True)
class _Member:
    """An image in a tar file."""

    path: Path
    name: str
    key: str
    offset: int
    length: int
    label: int

    def read(self) -> bytes:
        with self.path.open("rb") as stream:
            stream.seek(self.offset)
            return stream.read(self.length)

    def __str__(self) -> str:
        return f"{self.path}: {self.name}"


def pack_tars(files: list[Path], names: tuple[str, ...] | None) -> Packable:
    """List the images of tar files; `names` are those of classes, which are only numbers there."""
    members = {
        split: [member for path in paths for member in _members(path)]
        for split, paths in files_by_split(files).items()
    }
    for split, found in members.items():
        if not found:
            raise DataError(
                f"{files[0].parent}: its {split} tar files hold no {', '.join(SUFFIXES)}: name others"
            )
    if len(members) == 1:
        held = hold_out([member.key for member in members["train"]])
        both = members["train"]
        members = {
            split: [member for member, out in zip(both, held, strict=True) if out == (split == "val")]
            for split in ("train", "val")
        }
    splits = {split: _split(found) for split, found in members.items()}
    labels = {split: found.labels for split, found in splits.items()}
    identity, state = digest_files(files)
    return Packable(
        classes=check_classes(labels, names, lambda split, i: str(members[split][i])),
        splits=splits,
        identity=identity,
        state=state,
    )


def _split(members: list[_Member]) -> PackableSplit:
    return PackableSplit(
        labels=np.array([member.label for member in members], dtype=np.int64),
        names=[member.key for member in members],
        read=lambda i: members[i].read(),
        where=lambda i: str(members[i]),
        num_bytes=sum(member.length for member in members),
    )


def _members(path: Path) -> Iterator[_Member]:
    """The images of a tar file; members of one sample come one after another, with one key."""
    images: dict[str, tarfile.TarInfo] = {}
    labels: dict[str, int] = {}
    try:
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                key, suffix = _key(member.name)
                if not member.isreg():
                    continue
                if suffix in SUFFIXES:
                    if key in images:
                        raise DataError(f"{path}: {member.name}: a second image of {key}: keep one")
                    images[key] = member
                elif suffix in (".cls", ".json"):
                    stream = tar.extractfile(member)
                    assert stream is not None, "a regular member has content"
                    labels[key] = _label(f"{path}: {member.name}", suffix, stream.read())
    except (tarfile.TarError, OSError, EOFError) as error:
        raise DataError(f"{path}: not a whole tar file ({error}): fetch it again or remove it") from error
    for key, member in images.items():
        if key not in labels:
            raise DataError(f"{path}: {member.name}: has no {key}.cls or .json with its label: add it")
        yield _Member(path, member.name, key, member.offset_data, member.size, labels[key])


def _key(name: str) -> tuple[str, str]:
    """A member's key is its path up to the first dot of its file name; the rest is its kind."""
    path = PurePosixPath(name)
    stem, dot, suffix = path.name.partition(".")
    return str(path.parent / stem), (dot + suffix).lower()


def _label(where: str, suffix: str, text: bytes) -> int:
    try:
        found = json.loads(text)["label"] if suffix == ".json" else int(text.decode().strip())
        if isinstance(found, bool) or not isinstance(found, int):
            raise ValueError(f"{found!r} is no integer")
    except (ValueError, KeyError, TypeError) as error:
        shown = f"no label ({error})" if suffix == ".json" else f"{text[:20]!r} is no number"
        rule = 'a JSON object with an integer "label"' if suffix == ".json" else "the number of a class"
        raise DataError(f"{where}: {shown}: must be {rule}; correct it") from None
    return found
