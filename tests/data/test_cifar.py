"""CIFAR-10 batches: found, put together in order, and refused when broken."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lockstep.data.cifar import open_cifar10
from lockstep.errors import DataError

NAMES = (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin")


def write(folder: Path, num_records: int = 2) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for i, name in enumerate(NAMES):
        record = bytes([i]) + bytes([10 * i]) * 1024 + bytes([10 * i + 1]) * 1024 + bytes([10 * i + 2]) * 1024
        (folder / name).write_bytes(record * num_records)
    return folder


@pytest.mark.parametrize("below", ["", "cifar-10-batches-bin"])
def test_batches_are_read_in_order(tmp_path: Path, below: str) -> None:
    write(tmp_path / below)
    store = open_cifar10(tmp_path)
    images, labels = store.train.read(torch.tensor([9, 0]))
    assert images.shape == (2, 3, 32, 32) and labels.tolist() == [4, 0]
    assert images[0, :, 7, 9].tolist() == [40, 41, 42]
    assert store.test.read(torch.tensor([1]))[1].tolist() == [5]
    assert store.manifest["num_train"] == 10 and store.manifest["num_test"] == 2
    assert store.classes[9] == "truck"


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("data_batch_3.bin", lambda good: good[:-1], "truncated: expected 6146 bytes, found 6145"),
        ("test_batch.bin", lambda good: good[:3073], "truncated: expected 6146 bytes, found 3073"),
        ("data_batch_1.bin", lambda good: good + b"x", "overlong: expected 6146 bytes, found 6147"),
        ("data_batch_5.bin", lambda good: b"\x0a" + good[1:], "label 10 of sample 0 .* 0 to 9"),
    ],
)
def test_broken_files_are_named(
    tmp_path: Path, name: str, damage: Callable[[bytes], bytes], message: str
) -> None:
    path = write(tmp_path) / name
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=f"{path}: {message}"):
        open_cifar10(tmp_path)


def test_all_cut_alike(tmp_path: Path) -> None:
    for name in NAMES:
        (tmp_path / name).write_bytes(b"\0" * 3000)
    with pytest.raises(DataError, match=r"3000 bytes: .* records of 3073 bytes"):
        open_cifar10(tmp_path)


def test_missing_batches(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"lockstep data get cifar10 --dir {tmp_path}"):
        open_cifar10(tmp_path)
    (write(tmp_path) / "data_batch_2.bin").unlink()
    with pytest.raises(DataError, match=r"data_batch_2.bin missing"):
        open_cifar10(tmp_path)


@pytest.mark.data
def test_real_batches() -> None:
    store = open_cifar10(Path(os.environ["LOCKSTEP_TEST_DATA"]))
    assert (len(store.train), len(store.test)) == (50_000, 10_000)
    images, labels = store.train.read(torch.arange(50_000))
    assert labels.bincount().tolist() == [5000] * 10
    mean = images.to(torch.float32).mean((0, 2, 3)) / 255
    assert torch.allclose(mean, torch.tensor(store.mean), atol=1e-3)
