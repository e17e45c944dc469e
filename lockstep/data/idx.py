"""MNIST and Fashion-MNIST: their definitions with addresses and MD5 sums, and the reader of IDX files.

Data pipeline: store → order → augment → loader; this file makes a store. An IDX file holds a magic number
0x0000_08_DD (unsigned bytes, DD dimensions), DD big-endian sizes, and then the bytes.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from lockstep.data.data_set import DataSet, find_place
from lockstep.data.fetch import Archive, Published
from lockstep.data.hold_out import HoldOut
from lockstep.data.store import MemorySplit, Store, check_labels, content_sha256
from lockstep.errors import DataError

_NUM_DIMS = {"images-idx3": 3, "labels-idx1": 1}
_PARTS = {"train": "train", "test": "t10k"}


@dataclass(frozen=True)
class Idx:
    """One data set that is published as IDX files: its names, classes, statistics and content hash."""

    name: str
    folders: tuple[str, ...]  # names a subfolder may have, in lower case without - and _
    classes: tuple[str, ...]
    mean: float
    std: float
    sha256: str  # of the published content, as both sets have the same file names


MNIST = Idx(
    name="mnist",
    folders=("mnist", "raw"),
    classes=tuple("0123456789"),
    mean=0.1307,
    std=0.3081,
    sha256="1e35582d42a90940c55b956deb61875c020b567ed20e3c5b174f52bf7809ed9b",
)
FASHION = Idx(
    name="fashion",
    folders=("fashion", "fashionmnist", "raw"),
    classes=(
        "T-shirt/top",
        "Trouser",
        "Pullover",
        "Dress",
        "Coat",
        "Sandal",
        "Shirt",
        "Sneaker",
        "Bag",
        "Ankle boot",
    ),
    mean=0.2860,
    std=0.3530,
    sha256="ece172613115fb18b120bec8f6c02271af90b8b8f0a5af5c51cbd5ceed68e619",
)


def open_idx(kind: Idx, folder: Path) -> Store:
    """Read and check both splits of the data set in `folder` or in one of its known subfolders."""
    found = _find_folder(kind, folder)
    train, test = (_read_split(kind, found, part) for part in ("train", "test"))
    if train.images.shape[1:] != test.images.shape[1:]:
        raise DataError(
            f"{found}: train images are {_by(train.images)} and test images {_by(test.images)}: "
            f"both must be equal; fetch {kind.name} again"
        )
    content = content_sha256(train, test)
    for other in (MNIST, FASHION):
        if content == other.sha256 != kind.sha256:
            raise DataError(
                f"{found}: these files, though named as {kind.name}'s, are {other.name}'s: "
                f"use data.name={other.name} or name another data.dir"
            )
    channels, height, width = train.images.shape[1:]
    return Store(
        name=kind.name,
        classes=kind.classes,
        shape=(channels, height, width),
        train=train,
        test=test,
        mean=(kind.mean,),
        std=(kind.std,),
        manifest={
            "name": kind.name,
            "num_train": len(train),
            "num_test": len(test),
            "content_sha256": content,
        },
    )


def _by(images: Tensor) -> str:
    return f"{images.shape[-2]}x{images.shape[-1]}"


def _find_folder(kind: Idx, folder: Path) -> Path:
    """`folder`, or the subfolder (such as fashion-mnist or MNIST/raw) that holds any of the files."""
    found = _look_for(kind, folder)
    if found is None:
        raise DataError(
            f"data.dir={folder}: holds no {kind.name} files such as train-images-idx3-ubyte.gz; "
            f"run `lockstep data get {kind.name} --dir {folder}` or name another data.dir"
        )
    return found


def _look_for(kind: Idx, folder: Path) -> Path | None:
    def holds(place: Path) -> bool:
        return any(_variants(place, part, what) for part in _PARTS for what in _NUM_DIMS)

    return find_place(folder, kind.folders, holds)


def _variants(folder: Path, part: str, what: str) -> list[Path]:
    """The existing files under any name of this one: with - or ., plain (preferred) or gzipped."""
    names = (f"{_PARTS[part]}-{name}-ubyte" for name in (what, what.replace("-", ".")))
    paths = [folder / name for name in names]
    return [path for path in (*paths, *(Path(f"{path}.gz") for path in paths)) if path.is_file()]


def _read_split(kind: Idx, folder: Path, part: str) -> MemorySplit:
    images_path, labels_path = (_pick(kind, folder, part, what) for what in _NUM_DIMS)
    images, labels = _read_idx(images_path, 3), _read_idx(labels_path, 1).to(torch.int64)
    if len(images) != len(labels):
        raise DataError(
            f"{images_path}: {len(images)} images, but {labels_path.name} has {len(labels)} labels: "
            f"counts must be equal; fetch {kind.name} again"
        )
    check_labels(str(labels_path), labels, len(kind.classes))
    return MemorySplit(images.unsqueeze(1), labels)


def _pick(kind: Idx, folder: Path, part: str, what: str) -> Path:
    found = _variants(folder, part, what)
    if not found:
        raise DataError(
            f"{folder}: {_PARTS[part]}-{what}-ubyte or its .gz is missing; "
            f"run `lockstep data get {kind.name} --dir {folder}`"
        )
    return found[0]


def _read_idx(path: Path, num_dims: int) -> Tensor:
    """Read one file as a uint8 tensor; refuse a wrong magic number, size or length."""
    content = _read_bytes(path)
    header = 4 + 4 * num_dims
    if len(content) < header:
        raise DataError(f"{path}: expected at least {header} bytes, found {len(content)}: fetch it again")
    magic, *sizes = struct.unpack_from(f">{1 + num_dims}I", content)
    if magic != 0x0800 + num_dims:
        raise DataError(
            f"{path}: magic number 0x{magic:08x}, expected 0x{0x0800 + num_dims:08x}: "
            f"not an IDX file of bytes in {num_dims} dims; fetch it again"
        )
    if 0 in sizes:
        raise DataError(f"{path}: sizes {sizes} hold nothing: every size must be at least 1; fetch it again")
    expected = header + math.prod(sizes)
    if len(content) != expected:
        fault = "truncated" if len(content) < expected else "overlong"
        raise DataError(f"{path}: {fault}: expected {expected} bytes, found {len(content)}; fetch it again")
    return torch.frombuffer(content, dtype=torch.uint8, offset=header).view(sizes)


def _read_bytes(path: Path) -> bytearray:
    try:
        if path.suffix == ".gz":
            with gzip.open(path) as stream:
                return bytearray(stream.read())
        return bytearray(path.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        reason = "corrupt or truncated gzip" if path.suffix == ".gz" else "cannot be read"
        raise DataError(f"{path}: {reason} ({error}); fetch it again") from error


def _define(kind: Idx, base: str, *md5: str) -> DataSet:
    names = [f"{part}-{what}-ubyte.gz" for part in _PARTS.values() for what in _NUM_DIMS]
    return DataSet(
        kind.name,
        options=HoldOut,
        read=lambda options, folder: options.apply(open_idx(kind, folder)),
        find=partial(_look_for, kind),
        published=Published(base, tuple(map(Archive, names, md5))),
        files=f"where the {kind.name} files are",
    )


DATA_SETS = (
    _define(
        MNIST,
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "d53e105ee54ea40749a09fcbcd1e9432",
        "9fb629c4189551a2d022fa330f9573f3",
        "ec29112dd5afa0611ce80d1b7f02629c",
    ),
    _define(
        FASHION,
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
        "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "25c81989df183df01b3e8a0aad5dffbe",
        "bef4ecab320f06d8554ea6380940ec79",
        "bb300cfdad3c16e7a12a480ee83cd310",
    ),
)
