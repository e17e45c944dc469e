"""What `pack.json` says of a pack, and the index of a split; both are checked when they are read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.errors import DataError

VERSION = 1
FILE = "pack.json"
INDEX_TYPE = np.dtype(
    [
        ("shard", "<u4"),
        ("label", "<u4"),
        ("height", "<u4"),
        ("width", "<u4"),
        ("offset", "<u8"),  # of the image's bytes in its shard
        ("length", "<u8"),
    ]
)
_AGAIN = "copy the pack again or make it anew"


@dataclass(frozen=True)
class PackFile:
    """A file of a pack, which lies beside pack.json."""

    file: str
    bytes: int
    sha256: str

    def fault(self, folder: Path) -> str:
        """What is wrong with the file, as far as its size tells; empty if nothing is."""
        path = folder / self.file
        if not path.is_file():
            return f"{path}: is missing: {_AGAIN}"
        found = path.stat().st_size
        if found == self.bytes:
            return ""
        what = "truncated" if found < self.bytes else "overlong"
        return f"{path}: {what}: {found:,} bytes, {FILE} says {self.bytes:,}: {_AGAIN}"


@dataclass(frozen=True)
class SplitFacts:
    """The files of one split; `names_sha256` is that of a folder whose files were kept."""

    count: int
    index: PackFile
    names: PackFile
    shards: tuple[PackFile, ...]
    names_sha256: str = ""

    def files(self) -> tuple[PackFile, ...]:
        return (self.index, self.names, *self.shards)

    def content_sha256(self) -> str:
        """A hash over the hashes of index and shards."""
        return hashlib.sha256("".join(f.sha256 for f in (self.index, *self.shards)).encode()).hexdigest()


@dataclass(frozen=True)
class PackFacts:
    """The whole of pack.json; `mean` and `std` are a published set's own."""

    form: Mapping[str, Any]
    classes: tuple[str, ...]
    splits: Mapping[str, SplitFacts]
    source_sha256: str
    shard_bytes: int
    skipped: int = 0
    shape: tuple[int, int, int] | None = None  # H W C of every image, if they were pixels or are raw
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None

    @property
    def is_raw(self) -> bool:
        return bool(self.form["kind"] == "raw")

    def files(self) -> Iterator[PackFile]:
        for split in self.splits.values():
            yield from split.files()

    def to_json(self) -> bytes:
        return (json.dumps({"version": VERSION, **asdict(self)}, indent=1) + "\n").encode()


def read_facts(folder: Path) -> PackFacts:
    """Read and check pack.json."""
    path = folder / FILE
    if not path.is_file():
        raise DataError(
            f"{path}: there is none, so {folder} is no pack: `lockstep data pack SOURCE {folder}` makes one"
        )
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        version = table.pop("version")
        if version != VERSION:
            raise DataError(
                f"{path}: a pack of version {version}, this Lockstep reads version {VERSION}: "
                "use the Lockstep that made it, or pack again"
            )
        facts = _facts(table)
        if len(facts.shape or ()) != 3 and (facts.shape or facts.is_raw):
            raise ValueError(f"shape {facts.shape}")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{path}: damaged ({type(error).__name__}: {error}): {_AGAIN}") from error
    if set(facts.splits) not in ({"train", "val"}, {"train", "test"}, {"train", "val", "test"}):
        raise DataError(
            f"{path}: has splits {', '.join(facts.splits)}: needs train, and val or test: {_AGAIN}"
        )
    return facts


def _facts(table: dict[str, Any]) -> PackFacts:
    splits = {
        name: SplitFacts(
            count=int(row["count"]),
            index=_file(row["index"]),
            names=_file(row["names"]),
            shards=tuple(map(_file, row["shards"])),
            names_sha256=str(row["names_sha256"]),
        )
        for name, row in table.pop("splits").items()
    }
    for key in ("shape", "mean", "std"):
        table[key] = tuple(table[key]) if table[key] else None
    classes = tuple(map(str, table.pop("classes")))
    return PackFacts(classes=classes, splits=splits, **table)


def _file(row: Mapping[str, Any]) -> PackFile:
    name = str(row["file"])
    if name != Path(name).name or name in ("", ".", ".."):  # a pack from elsewhere names only its own files
        raise ValueError(f"{name!r} is no name of a file")
    return PackFile(name, int(row["bytes"]), str(row["sha256"]))


def check_files(folder: Path, facts: PackFacts) -> None:
    """Refuse a pack with a file that is missing or of another size."""
    faults = [fault for file in facts.files() if (fault := file.fault(folder))]
    if faults:
        more = f"; {len(faults) - 1} more such files" if len(faults) > 1 else ""
        raise DataError(f"{faults[0]}; `lockstep data check pack --dir {folder}` checks every file{more}")


def open_index(folder: Path, facts: PackFacts, split: SplitFacts) -> npt.NDArray[np.void]:
    """Map a split's index into memory and check all of it; nothing here is done sample by sample."""
    path = folder / split.index.file
    index = map_array(path)
    if index.dtype != INDEX_TYPE or index.shape != (split.count,):
        raise DataError(
            f"{path}: an index of {index.shape} {index.dtype}, {FILE} says {split.count:,} samples: {_AGAIN}"
        )
    sizes = np.array([file.bytes for file in split.shards], dtype=np.uint64)
    shard, offset, length = index["shard"], index["offset"], index["length"]
    limit = sizes[np.minimum(shard, len(sizes) - 1)] if len(sizes) else np.zeros(len(index), np.uint64)
    faults = {
        "is in a shard that is not there": shard >= len(sizes),
        "lies outside its shard": (length > limit) | (offset > limit - np.minimum(length, limit)),
        "has no bytes": length == 0,
        "has no pixels": (index["height"] == 0) | (index["width"] == 0),
        f"has a label that is not 0 to {len(facts.classes) - 1}": index["label"] >= len(facts.classes),
    }
    for what, where in faults.items():
        if where.any():
            raise DataError(f"{path}: sample {int(where.argmax())} {what}: {_AGAIN}")
    return index


def map_array(path: Path) -> npt.NDArray[Any]:
    """Map a NumPy file into memory."""
    try:
        array: npt.NDArray[Any] = np.load(path, mmap_mode="r")
    except (OSError, ValueError, EOFError, SyntaxError, TokenError) as error:  # of a damaged header too
        raise DataError(f"{path}: no array ({error}): {_AGAIN}") from error
    return array


def hash_file(path: Path) -> PackFile:
    """The facts of a file that is there."""
    with path.open("rb") as stream:
        sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
    return PackFile(path.name, path.stat().st_size, sha256)
