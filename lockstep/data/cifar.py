"""CIFAR-10: its definition with addresses and MD5 sums, and the reader of its binary batches.

Data pipeline: store → order → augment → loader; this file makes a store. A batch file holds records of
3073 bytes: one label, then the red, green and blue planes of 32x32 pixels.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import torch
from torch import Tensor

from lockstep.data.data_set import DataSet, find_place
from lockstep.data.fetch import Archive, Published
from lockstep.data.hold_out import HoldOut
from lockstep.data.store import MemorySplit, Store, check_labels, content_sha256
from lockstep.errors import DataError

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_FOLDER = "cifar-10-batches-bin"
_PLACES = ("cifar10", "cifar10batchesbin")  # names a subfolder may have, in lower case without - and _
_FILES = (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin")
_SHAPE = (3, 32, 32)
_RECORD_BYTES = 1 + 3 * 32 * 32
_PUBLISHED_BYTES = 10_000 * _RECORD_BYTES


def open_cifar10(folder: Path) -> Store:
    """Read and check the six batches in `folder` or in a subfolder such as cifar-10-batches-bin."""
    paths = _find_batches(folder)
    _check_lengths(paths)
    batches = [_read_batch(path) for path in paths]
    train = MemorySplit(
        torch.cat([images for images, _ in batches[:-1]]), torch.cat([labels for _, labels in batches[:-1]])
    )
    test = MemorySplit(*batches[-1])
    return Store(
        name="cifar10",
        classes=CLASSES,
        shape=_SHAPE,
        train=train,
        test=test,
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
        manifest={
            "name": "cifar10",
            "num_train": len(train),
            "num_test": len(test),
            "content_sha256": content_sha256(train, test),
        },
    )


def _find_batches(folder: Path) -> list[Path]:
    """The paths of all six batches, the test batch last."""
    found = _look_for(folder)
    if found is None:
        raise DataError(
            f"data.dir={folder}: holds no cifar10 batches such as {_FILES[0]}, nor does its {_FOLDER}; "
            f"run `lockstep data get cifar10 --dir {folder}` or name another data.dir"
        )
    missing = [name for name in _FILES if not (found / name).is_file()]
    if missing:
        raise DataError(
            f"{found}: {', '.join(missing)} missing: cifar10 needs all six batches; "
            f"run `lockstep data get cifar10 --dir {folder}`"
        )
    return [found / name for name in _FILES]


def _look_for(folder: Path) -> Path | None:
    return find_place(folder, _PLACES, lambda place: any((place / name).is_file() for name in _FILES))


def _check_lengths(paths: list[Path]) -> None:
    """Refuse batch files of unequal length: this also finds a file that was cut between two records."""
    lengths = [path.stat().st_size for path in paths]
    usual = Counter(lengths).most_common(1)[0][0]
    expected = _PUBLISHED_BYTES if _PUBLISHED_BYTES in lengths else usual
    for path, length in zip(paths, lengths, strict=True):
        if length != expected:
            fault = "truncated" if length < expected else "overlong"
            raise DataError(f"{path}: {fault}: expected {expected} bytes, found {length}; fetch it again")
    if expected == 0 or expected % _RECORD_BYTES:
        raise DataError(
            f"{paths[0]}: {expected} bytes: a batch is one or more records of {_RECORD_BYTES} bytes "
            f"({_PUBLISHED_BYTES} bytes as published); fetch it again"
        )


def _read_batch(path: Path) -> tuple[Tensor, Tensor]:
    try:
        content = bytearray(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); fetch it again") from error
    records = torch.frombuffer(content, dtype=torch.uint8).view(-1, _RECORD_BYTES)
    labels = records[:, 0].to(torch.int64)
    check_labels(str(path), labels, len(CLASSES))
    return records[:, 1:].reshape(-1, *_SHAPE), labels


DATA_SETS = (
    DataSet(
        "cifar10",
        options=HoldOut,
        read=lambda options, folder: options.apply(open_cifar10(folder)),
        find=_look_for,
        published=Published(
            "https://www.cs.toronto.edu/~kriz/",
            (
                Archive(
                    "cifar-10-binary.tar.gz",
                    "c32a1d4ab5d03f1284b67883e8d87530",
                    members=tuple(f"{_FOLDER}/{name}" for name in _FILES),
                ),
            ),
        ),
        files="where the cifar10 files are",
    ),
)
