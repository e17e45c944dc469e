"""A folder of images: how it is split, decoded, cached and refused."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lockstep.data.images import encoded_split
from lockstep.data.images.folder import FolderOptions, check_folder, open_folder, open_images
from lockstep.data.images.image_file import read_image
from lockstep.errors import DataError

OPTIONS = FolderOptions(size=8)


def paint(path: Path, value: int = 0, size: tuple[int, int] = (12, 9)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (value, 100, 200)).save(path)
    return path


def fill(root: Path, classes: tuple[str, ...] = ("cat", "dog"), count: int = 6) -> Path:
    for i, name in enumerate(classes):
        for j in range(count):
            paint(root / name / f"{j}.{('png', 'PNG')[j % 2]}", value=10 * i + j)
    return root


def test_train_and_val(tmp_path: Path) -> None:
    fill(tmp_path / "train")
    fill(tmp_path / "val", count=2)
    (tmp_path / "train" / "cat" / "notes.txt").write_text("not an image")
    store = open_folder(OPTIONS, tmp_path)
    assert (store.classes, store.shape) == (("cat", "dog"), (3, 8, 8))
    assert (len(store.train), len(store.test)) == (12, 4)
    images, labels = store.train.read(torch.tensor([11, 0, 11]))
    assert images[:, 0, 4, 4].tolist() == [15, 0, 15] and labels.tolist() == [1, 0, 1]
    assert store.manifest["num_train"] == 12 and store.manifest["num_test"] == 4


@pytest.mark.parametrize("name", ["val", "valid", "validation"])
def test_val_and_test_are_told_apart(tmp_path: Path, name: str) -> None:
    fill(tmp_path / "train")
    fill(tmp_path / name, count=2)
    one = open_folder(OPTIONS, tmp_path)
    assert one.chosen_by == ("val", one.test) and list(one.eval_splits()) == ["val"]
    assert one.notices == (
        f"images: {tmp_path / 'train'} (12) to train on, "
        f"{tmp_path / name} (4) to evaluate on after every epoch",
    )
    fill(tmp_path / "test", count=3)
    both = open_folder(OPTIONS, tmp_path)
    assert {part: len(split) for part, split in both.eval_splits().items()} == {"val": 4, "test": 6}
    assert both.chosen_by == ("val", both.val)
    assert both.notices[0].endswith(f"{tmp_path / 'test'} (6) to evaluate on at the end")
    assert both.manifest["val_sha256"] == one.manifest["test_sha256"] != both.manifest["test_sha256"]


def test_only_test_is_called_test_and_what_is_held_out_val(tmp_path: Path) -> None:
    fill(tmp_path / "train")
    assert list(open_folder(OPTIONS, tmp_path).eval_splits()) == ["val"]
    fill(tmp_path / "test", count=2)
    assert list(open_folder(OPTIONS, tmp_path).eval_splits()) == ["test"]


def test_two_folders_for_one_split_are_refused_and_a_class_may_have_any_name(tmp_path: Path) -> None:
    assert open_folder(OPTIONS, fill(tmp_path / "flat", ("invalid", "valid"))).classes == ("invalid", "valid")
    for name in ("train", "val", "validation"):
        fill(tmp_path / "twice" / name)
    with pytest.raises(DataError, match=r"twice: has val/ and validation/: both are val; keep one"):
        open_folder(OPTIONS, tmp_path / "twice")


def test_what_is_left_out_or_missing_is_said(tmp_path: Path) -> None:
    fill(tmp_path / "train")
    fill(tmp_path / "val", ("cat",))
    for name in ("a.webp", "b.WEBP", "c.gif", "notes", ".hidden", "more/d.png"):
        path = tmp_path / "train" / "dog" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
    for number in range(3):
        (tmp_path / "train" / f"{number}.png").write_bytes(b"in no class")
    (tmp_path / "train" / "._0.png").write_bytes(b"hidden")
    left_out, missing = open_folder(OPTIONS, tmp_path).warnings
    kinds = left_out.replace("1 folder, 1 .gif", "1 .gif, 1 folder")
    assert "3 beside these folders, 2 .webp, 1 .gif, 1 folder, 1 without suffix: convert" in kinds
    assert missing.startswith(f"{tmp_path / 'val'}: no image of class dog")


def test_every_bad_file_is_found_at_once(tmp_path: Path) -> None:
    fill(tmp_path / "train")
    fill(tmp_path / "test")
    assert check_folder(OPTIONS, tmp_path, lambda done, total: None) == []
    cut = paint(tmp_path / "test" / "dog" / "cut.jpg", size=(200, 200))
    cut.write_bytes(cut.read_bytes()[:-300])
    none = tmp_path / "train" / "cat" / "none.png"
    none.write_bytes(b"this is no image")
    counts: list[tuple[int, int]] = []
    bad = check_folder(OPTIONS, tmp_path, lambda done, total: counts.append((done, total)))
    assert [line.partition(": unreadable image")[0] for line in bad] == [str(none), str(cut)]
    assert counts == [(done, 26) for done in range(1, 27)]


def test_other_images_by_the_classes_of_a_run(tmp_path: Path) -> None:
    fill(tmp_path / "all", ("dog", "emu"))
    place, split = open_images(tmp_path / "all", ("cat", "dog", "emu"), (3, 8, 8), None)
    assert place == tmp_path / "all" and split.read(torch.arange(12))[1].tolist() == [1] * 6 + [2] * 6
    with pytest.raises(DataError, match=r"all: class emu is not one of the run's: cat, dog"):
        open_images(tmp_path / "all", ("cat", "dog"), (3, 8, 8), None)
    with pytest.raises(DataError, match=r"all: has no val images, only classes"):
        open_images(tmp_path / "all", ("cat", "dog", "emu"), (3, 8, 8), "val")
    fill(tmp_path / "parts" / "validation", count=2)
    assert len(open_images(tmp_path / "parts", ("cat", "dog"), (3, 8, 8), None)[1]) == 4
    with pytest.raises(DataError, match=r"parts: has no test images, only validation/"):
        open_images(tmp_path / "parts", ("cat", "dog"), (3, 8, 8), "test")


def test_held_out_by_name(tmp_path: Path) -> None:
    half = FolderOptions(size=8, val_fraction=0.5)
    direct = open_folder(half, fill(tmp_path / "a", count=40))
    below = open_folder(half, fill(tmp_path / "b" / "train", count=40).parent)
    assert direct.manifest == below.manifest
    assert len(direct.train) + len(direct.test) == 80 and 25 < len(direct.test) < 55
    other = open_folder(FolderOptions(size=8, val_fraction=0.5, seed=1), tmp_path / "a")
    assert other.manifest["test_sha256"] != direct.manifest["test_sha256"]


def test_few_images_still_give_both_splits(tmp_path: Path) -> None:
    fill(tmp_path, count=2)
    for fraction in (1e-9, 0.999999):
        store = open_folder(FolderOptions(size=8, val_fraction=fraction), tmp_path)
        assert len(store.test) >= 1 and store.classes == ("cat", "dog")
    with pytest.raises(DataError, match=r"at least 2 images"):
        open_folder(OPTIONS, fill(tmp_path / "single", count=1))


def test_decoded_once_where_it_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_folder(OPTIONS, fill(tmp_path))
    ids = torch.arange(len(store.train))
    first = store.train.read(ids)[0]
    monkeypatch.setattr(encoded_split, "IN_MEMORY_BYTES", 0)
    uncached = open_folder(OPTIONS, tmp_path)
    assert torch.equal(first, uncached.train.read(ids)[0])
    for path in tmp_path.glob("*/*"):
        path.unlink()
    assert torch.equal(first, store.train.read(ids)[0])
    with pytest.raises(DataError, match=r"No such file"):
        uncached.train.read(ids)


def test_bad_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds no class folders"):
        open_folder(OPTIONS, tmp_path)
    fill(tmp_path / "train")
    (tmp_path / "train" / "emu").mkdir()
    with pytest.raises(DataError, match=r"train/emu: class folder without images"):
        open_folder(OPTIONS, tmp_path)
    (tmp_path / "train" / "emu").rmdir()
    odd = Path(os.fsdecode(os.fsencode(tmp_path / "train" / "cat") + b"/\xff.png"))
    paint(tmp_path / "train" / "cat" / "x.png").rename(odd)
    with pytest.raises(DataError, match=r"train: the name 'cat/.udcff.png' is not UTF-8: rename it"):
        open_folder(OPTIONS, tmp_path)
    odd.unlink()
    fill(tmp_path / "val", ("cat", "fox"))
    with pytest.raises(DataError, match=r"val: class fox is not in .*train"):
        open_folder(OPTIONS, tmp_path)
    with pytest.raises(DataError, match=r"has val/ but no train/"):
        (tmp_path / "train").rename(tmp_path / "training")
        open_folder(OPTIONS, tmp_path)


def test_one_class_is_no_data_set(tmp_path: Path) -> None:
    fill(tmp_path, ("cat",))
    with pytest.raises(DataError, match=r"images of one class only, cat: .* one level higher or lower"):
        open_folder(OPTIONS, tmp_path)


def test_unreadable_images_are_named(tmp_path: Path) -> None:
    fill(tmp_path)
    bad = tmp_path / "cat" / "bad.jpg"
    os.mkfifo(bad)
    with pytest.raises(DataError, match=f"{bad}: unreadable image .no file."):
        open_folder(OPTIONS, tmp_path)
    bad.unlink()
    bad.write_bytes(b"this is no image")
    with pytest.raises(DataError, match=f"{bad}: unreadable image .not an image."):
        open_folder(OPTIONS, tmp_path)
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(bad)
    bad.write_bytes(bad.read_bytes()[:-800])  # its header is whole, its pixels are not
    store = open_folder(OPTIONS, tmp_path)
    with pytest.raises(DataError, match=f"{bad}: unreadable image .*repair or remove it.*--data-changed"):
        for split in (store.train, store.test):
            split.read(torch.arange(len(split)))


@pytest.mark.parametrize(
    ("option", "value"),
    [("size", 0), ("size", 10**9), ("channels", 2), ("val_fraction", 0.0), ("val_fraction", 1.0)],
)
def test_bad_options_are_named(option: str, value: float) -> None:
    with pytest.raises(DataError, match=f"data.{option}={value}"):
        FolderOptions(**{option: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16"])
@pytest.mark.parametrize("channels", [1, 3])
def test_every_mode_is_read(tmp_path: Path, mode: str, channels: int) -> None:
    path = tmp_path / ("image.jpg" if mode == "CMYK" else "image.png")
    image = Image.new(mode, (20, 10), 40000 if mode == "I;16" else 0)
    image.save(path, **({"transparency": b"\x00\x80"} if mode == "P" else {}))
    pixels, size = read_image(path, (channels, 8, 8))
    assert pixels.shape == (channels, 8, 8) and pixels.dtype == torch.uint8 and size == (10, 20)
    if mode == "I;16":
        assert pixels.unique().tolist() == [40000 >> 8]


def test_the_centre_is_kept(tmp_path: Path) -> None:
    array = np.zeros((8, 24), np.uint8)
    array[:, 8:16] = 255
    Image.fromarray(array).save(tmp_path / "wide.png")
    assert read_image(tmp_path / "wide.png", (1, 8, 8))[0].min() == 255
    with pytest.raises(DataError, match=r"1 or 3 channels, not the 5"):
        read_image(tmp_path / "wide.png", (5, 8, 8))
