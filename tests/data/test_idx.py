"""IDX files: every layout that is published, and every way a file can be broken."""

from __future__ import annotations

import gzip
import os
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lockstep.data import idx
from lockstep.data.idx import FASHION, MNIST, open_idx
from lockstep.errors import DataError

TRAIN_IMAGES = "train-images-idx3-ubyte"


def pack(*sizes: int, content: bytes) -> bytes:
    return struct.pack(f">{1 + len(sizes)}I", 0x0800 + len(sizes), *sizes) + content


def files(num_train: int = 6, num_test: int = 3) -> dict[str, bytes]:
    made = {}
    for part, num in (("train", num_train), ("t10k", num_test)):
        pixels = bytes(i % 251 for i in range(num * 20))
        made[f"{part}-images-idx3-ubyte"] = pack(num, 4, 5, content=pixels)
        made[f"{part}-labels-idx1-ubyte"] = pack(num, content=bytes(i % 10 for i in range(num)))
    return made


def write(folder: Path, made: dict[str, bytes], rename: Callable[[str], str] = str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in made.items():
        path = folder / rename(name)
        path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return folder


@pytest.mark.parametrize("below", ["", "mnist", "MNIST/raw", "raw"])
@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("mark", ["-", "."])
def test_layouts_give_the_same(tmp_path: Path, below: str, suffix: str, mark: str) -> None:
    write(tmp_path / below, files(), lambda name: name.replace("-idx", f"{mark}idx") + suffix)
    store = open_idx(MNIST, tmp_path)
    images, labels = store.train.read(torch.tensor([1, 5]))
    assert images.shape == (2, 1, 4, 5) and images[0, 0, 0, 0] == 20 and labels.tolist() == [1, 5]
    assert store.shape == (1, 4, 5) and len(store.test) == 3 and store.classes[3] == "3"
    plain = open_idx(MNIST, write(tmp_path / "plain", files()))
    assert store.manifest == plain.manifest and store.manifest["num_train"] == 6


def test_siblings_are_told_apart(tmp_path: Path) -> None:
    write(tmp_path / "mnist", files(6))
    write(tmp_path / "fashion-mnist", files(7))
    assert len(open_idx(MNIST, tmp_path).train) == 6
    fashion = open_idx(FASHION, tmp_path)
    assert len(fashion.train) == 7 and fashion.classes[9] == "Ankle boot"


def test_content_changes_the_manifest(tmp_path: Path) -> None:
    made = files()
    changed = {**made, TRAIN_IMAGES: made[TRAIN_IMAGES][:-1] + b"\xff"}
    first = open_idx(MNIST, write(tmp_path / "a", made)).manifest["content_sha256"]
    assert first != open_idx(MNIST, write(tmp_path / "b", changed)).manifest["content_sha256"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (TRAIN_IMAGES, lambda good: good[:-7], "truncated: expected 136 bytes, found 129"),
        (TRAIN_IMAGES, lambda good: good + b"123", "overlong: expected 136 bytes, found 139"),
        (TRAIN_IMAGES, lambda good: good[:9], "at least 16 bytes, found 9"),
        (TRAIN_IMAGES, lambda good: b"\x7fELF" + good[4:], "magic number 0x7f454c46, expected 0x00000803"),
        (TRAIN_IMAGES, lambda good: pack(0, 4, 5, content=b""), r"sizes \[0, 4, 5\]"),
        ("t10k-labels-idx1-ubyte", lambda good: pack(4, content=b"0000"), "3 images, .* 4 labels"),
        ("t10k-labels-idx1-ubyte", lambda good: good[:-1] + b"\x0a", "label 10 of sample 2 .* 0 to 9"),
        ("t10k-images-idx3-ubyte", lambda good: pack(3, 5, 4, content=good[16:]), "4x5 and test images 5x4"),
    ],
)
def test_broken_files_are_named(
    tmp_path: Path, name: str, content: Callable[[bytes], bytes], message: str
) -> None:
    made = files()
    made[name] = content(made[name])
    with pytest.raises(DataError, match=message) as caught:
        open_idx(MNIST, write(tmp_path, made))
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "damage", [lambda b: b[:-12], lambda b: b"no gzip", lambda b: b[:20] + b"\0\0" + b[22:]]
)
def test_corrupt_gzip(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    write(tmp_path, files(), lambda name: name + ".gz")
    path = tmp_path / f"{TRAIN_IMAGES}.gz"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=f"{path}: corrupt or truncated gzip"):
        open_idx(MNIST, tmp_path)


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"lockstep data get mnist --dir {tmp_path}"):
        open_idx(MNIST, tmp_path)
    made = files()
    del made["t10k-labels-idx1-ubyte"]
    with pytest.raises(DataError, match=r"t10k-labels-idx1-ubyte or its .gz is missing"):
        open_idx(MNIST, write(tmp_path, made))


@pytest.mark.data
@pytest.mark.parametrize("kind", [MNIST, FASHION], ids=lambda kind: kind.name)
def test_real_files(kind: object) -> None:
    assert kind in (MNIST, FASHION)
    store = open_idx(kind, Path(os.environ["LOCKSTEP_TEST_DATA"]))  # type: ignore[arg-type]
    assert (len(store.train), len(store.test), store.shape) == (60_000, 10_000, (1, 28, 28))
    pixels = store.train.read(torch.arange(60_000))[0].float() / 255
    assert abs(pixels.mean() - store.mean[0]) < 1e-3 and abs(pixels.std() - store.std[0]) < 1e-3


def test_the_files_of_the_other_set_are_known(tmp_path, monkeypatch):
    made = files()
    known = open_idx(FASHION, write(tmp_path, made)).manifest["content_sha256"]
    monkeypatch.setattr(idx, "MNIST", replace(MNIST, sha256=known))
    with pytest.raises(DataError, match=r"are mnist's: use data\.name=mnist or name another data\.dir"):
        open_idx(FASHION, tmp_path)
    assert open_idx(idx.MNIST, tmp_path).name == "mnist"
