"""Sizes of images that are kept: used again, read again for what changed, and never in the way."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from PIL import Image

from lockstep.data.images import size_cache
from lockstep.data.images.folder import FolderOptions, open_folder, open_images
from lockstep.data.store import Store

OPTIONS = FolderOptions(size=8)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files whose headers are read."""
    found: list[str] = []
    measure = size_cache.measure_file
    monkeypatch.setattr(size_cache, "measure_file", lambda path: (found.append(path), measure(path))[1])
    return found


def fill(folder: Path) -> Path:
    for split in ("train", "val"):
        for label in ("cat", "dog"):
            for i, name in enumerate(("1.png", "x\ny.png")):
                path = folder / split / label / name
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.new("RGB", (10 + i, 20 + len(split))).save(path)
    return folder


def sizes(store: Store) -> list[list[int]]:
    import torch

    return [
        size for part in (store.train, store.test) for size in part.sizes(torch.arange(len(part))).tolist()
    ]


def test_headers_are_read_once_and_again_for_what_changed(tmp_path: Path, measured: list[str]) -> None:
    folder = fill(tmp_path / "photos")
    first = sizes(open_folder(OPTIONS, folder))
    assert len(measured) == 8 and first == [[25, 10], [25, 11]] * 2 + [[23, 10], [23, 11]] * 2
    assert sizes(open_folder(OPTIONS, folder)) == first and len(measured) == 8
    path = folder / "val" / "dog" / "1.png"
    before = path.stat()
    Image.new("RGB", (30, 40)).save(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # its time of change is another all the same
    assert sizes(open_folder(OPTIONS, folder))[6] == [40, 30] and measured[8:] == [str(path)]
    open_images(folder, ("cat", "dog"), (3, 8, 8), "val")
    assert sizes(open_folder(OPTIONS, folder))[6] == [40, 30]
    assert len(measured) == 9 + 4  # the other images have sizes of their own


def test_a_damaged_or_missing_place_is_no_trouble(tmp_path: Path, cache: Path, measured: list[str]) -> None:
    folder = fill(tmp_path / "photos")
    wanted = sizes(open_folder(OPTIONS, folder))
    (kept,) = (cache / "lockstep" / "sizes").glob("*.npz")
    kept.write_bytes(kept.read_bytes()[:100])
    assert sizes(open_folder(OPTIONS, folder)) == wanted and len(measured) == 16
    for path in (cache / "lockstep" / "sizes").iterdir():
        path.unlink()
    (cache / "lockstep" / "sizes").rmdir()
    (cache / "lockstep" / "sizes").write_text("a file where the folder would be")
    assert sizes(open_folder(OPTIONS, folder)) == wanted and len(measured) == 24
