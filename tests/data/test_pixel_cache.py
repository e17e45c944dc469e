"""Decoded pixels that are kept on a disk: the same, within a size, and damaged ones are decoded anew."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forked import call
from photos import photo_run, take_photos
from PIL import Image
from small import command

from lockstep.data import open_data
from lockstep.data.feeding import _chosen, choose_feeding
from lockstep.data.images.encoded_split import EncodedSplit
from lockstep.errors import SpecError
from lockstep.spec import Launch

SLOT = 3 * 16 * 16 + 8


@pytest.fixture(autouse=True)
def plain_feeding() -> Any:
    before = list(_chosen)
    yield
    _chosen[:] = before


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return take_photos(tmp_path_factory.mktemp("photos"), train=8, val=2)


def read(photos: Path, cache: Path | None, slots: float = 1e6) -> tuple[torch.Tensor, EncodedSplit]:
    choose_feeding(Launch(pixel_cache=cache, pixel_cache_gb=slots * SLOT / 1e9, decode_threads=2))
    split = open_data(photo_run(photos)).train
    assert isinstance(split, EncodedSplit)
    return split.decode(torch.arange(len(split))), split


def count_decoded(split: EncodedSplit, monkeypatch: pytest.MonkeyPatch) -> int:
    found = []
    with monkeypatch.context() as patch:
        patch.setattr(split._decoder, "_fill", lambda index, box, out: found.append(index))
        split.decode(torch.arange(len(split)))
    return len(found)


def files(cache: Path) -> list[Path]:
    return sorted(cache.glob("*.pixels"))


def test_pixels_are_those_of_the_files_and_decoded_once(photos, tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    plain, _ = read(photos, None)
    first, _ = read(photos, tmp_path / "cache")
    again, split = read(photos, tmp_path / "cache")
    assert torch.equal(plain, first) and torch.equal(plain, again)
    assert count_decoded(split, monkeypatch) == 0
    assert [path.stat().st_size for path in files(tmp_path / "cache")] == [24 * SLOT]


def test_a_damaged_slot_is_decoded_anew(photos, tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    plain, _ = read(photos, tmp_path)
    (path,) = files(tmp_path)
    data = bytearray(path.read_bytes())
    data[3 * SLOT + 5] ^= 1  # a pixel
    data[7 * SLOT : 8 * SLOT] = data[6 * SLOT : 7 * SLOT]  # another image's slot
    data[9 * SLOT + 100 : 10 * SLOT] = bytes(SLOT - 100)  # half written
    path.write_bytes(data)
    again, split = read(photos, tmp_path)
    assert torch.equal(plain, again) and count_decoded(split, monkeypatch) == 0
    data[0] ^= 1
    path.write_bytes(data)
    assert count_decoded(read(photos, None)[1], monkeypatch) == 24


def test_it_never_takes_more_than_is_given(photos, tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    plain, split = read(photos, tmp_path, slots=10.5)
    assert count_decoded(split, monkeypatch) == 14 and files(tmp_path)[0].stat().st_size == 10 * SLOT
    del split
    old = tmp_path / "0.pixels"
    old.write_bytes(bytes(20 * SLOT))
    os.utime(old, (1, 1))
    again, split = read(photos, tmp_path, slots=24)
    assert torch.equal(plain, again) and count_decoded(split, monkeypatch) == 0
    assert not old.exists() and sum(path.stat().st_size for path in files(tmp_path)) == 24 * SLOT
    assert count_decoded(read(photos, tmp_path, slots=5)[1], monkeypatch) == 24  # it is used, and too large
    del split
    assert count_decoded(read(photos, tmp_path, slots=5)[1], monkeypatch) == 19


def test_a_changed_file_is_another_cache(tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    photos = take_photos(tmp_path / "photos", train=4, val=2)
    plain, _ = read(photos, tmp_path / "cache")
    path = photos / "train" / "red" / "0.jpg"
    Image.fromarray(np.full((20, 24, 3), 9, np.uint8)).save(path)
    os.utime(path, ns=(time.time_ns(), time.time_ns() + 10))
    changed, _ = read(photos, tmp_path / "cache")
    assert not torch.equal(plain, changed) and torch.equal(changed, read(photos, None)[0])


def test_bad_settings_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SpecError, match=r"--pixel-cache .*file: .*: name a folder on a local disk"):
        choose_feeding(Launch(pixel_cache=tmp_path / "file"))
    with pytest.raises(SpecError, match="--pixel-cache-gb 0 must be above 0"):
        Launch(pixel_cache_gb=0)


def test_two_workers_with_a_cache_train_to_the_bits_of_one_without(photos: Path, tmp_path: Path) -> None:
    def train(name: str, *flags: str) -> str:
        keys = ("data.name=folder", f"data.dir={photos}", "data.size=16", "train.batch=8", "train.lanes=2")
        words = [word for key in (*keys, "train.epochs=2") for word in ("-o", key)]
        shown = ("--runs-dir", str(tmp_path / "runs"), "--name", name, "--device", "cpu")
        done = call(command("train", *shown, *words, *flags), launches=True)
        assert done.returncode == 0, done.stderr
        return next(line for line in done.stdout.splitlines() if line.startswith("weights_sha256"))

    cache = ("--pixel-cache", str(tmp_path / "cache"), "--pixel-cache-gb", "0.000012")
    expected = train("plain")
    assert train("cold", *cache, "--workers", "2") == expected == train("warm", *cache)
    assert 0 < sum(path.stat().st_size for path in files(tmp_path / "cache")) <= 12_000
