"""What may go into a pack, and what is refused: odd and bad images, changed sources, full disks."""

from __future__ import annotations

import io
import shutil
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch
from photos import take_photos
from PIL import Image

import lockstep
from lockstep.cli.main import run
from lockstep.data import open_store
from lockstep.data.images.folder import FolderOptions
from lockstep.data.pack import write_pack as writing
from lockstep.data.pack.from_folder import pack_folder
from lockstep.data.pack.image_form import ImageForm
from lockstep.data.pack.write_pack import PackPlan, PackResult, write_pack
from lockstep.errors import DataError


def write(folder: Path, dest: Path, **plan: object) -> PackResult:
    return write_pack(pack_folder(FolderOptions(), folder), dest, PackPlan(**plan))  # type: ignore[arg-type]


def odd_images() -> dict[str, bytes]:
    """Images of every kind that can be decoded, all 40 wide and 30 high once they are upright."""
    noise = np.random.default_rng(0).integers(0, 256, (30, 40, 3), dtype=np.uint8)
    plain, wide = Image.fromarray(noise), Image.fromarray(noise.transpose(1, 0, 2).copy())
    turned = Image.Exif()
    turned[0x0112] = 6
    kinds: dict[str, tuple[Image.Image, str, dict[str, object]]] = {
        "plain.jpg": (plain, "JPEG", {}),
        "progressive.jpg": (plain, "JPEG", {"progressive": True}),
        "cmyk.jpg": (plain.convert("CMYK"), "JPEG", {}),
        "grey.jpg": (plain.convert("L"), "JPEG", {}),
        "turned.jpg": (wide, "JPEG", {"exif": turned}),
        "turned.png": (wide, "PNG", {"exif": turned}),
        "palette.png": (plain.quantize(16), "PNG", {}),
        "alpha.png": (plain.convert("RGBA"), "PNG", {}),
        "bits.png": (plain.convert("1"), "PNG", {}),
        "deep.png": (Image.fromarray(noise[..., 0].astype(np.uint16) << 8), "PNG", {}),
        "animated.png": (plain, "PNG", {"save_all": True, "append_images": [plain.rotate(180)]}),
        "really-a-gif.png": (plain, "GIF", {}),
    }
    found = {}
    for name, (image, format, options) in kinds.items():
        stream = io.BytesIO()
        image.save(stream, format, **options)
        found[name] = stream.getvalue()
    return found


def bad_images() -> dict[str, bytes]:
    good = odd_images()
    bomb = bytearray(good["alpha.png"])
    bomb[16:24] = (60_000).to_bytes(4) * 2  # its height and width
    return {
        "bomb.png": bytes(bomb),
        "broken.png": good["alpha.png"][:-300],
        "empty.jpg": b"",
        "text.jpg": b"not an image",
        "truncated.jpg": good["plain.jpg"][:-200],
        "truncated-too.jpg": good["progressive.jpg"][:-200],
    }


def fill(folder: Path, files: dict[str, bytes]) -> Path:
    for name in ("a", "b"):
        for file, data in files.items():
            path = folder / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    return folder


@pytest.mark.parametrize("form", [ImageForm(), ImageForm("jpeg", 20), ImageForm("raw", 16)])
def test_every_kind_of_image_is_packed_upright(tmp_path: Path, form: ImageForm) -> None:
    folder = fill(tmp_path / "set", odd_images())
    assert write(folder, tmp_path / "pack", form=form).is_done
    index = np.load(tmp_path / "pack" / "train.index.npy")
    size = {"files": (30, 40), "jpeg": (20, 27), "raw": (16, 16)}[form.kind]
    assert {(row["height"], row["width"]) for row in index} == {size}
    one, two = open_store("folder", folder, {"size": 16}), open_store("pack", tmp_path / "pack", {"size": 16})
    ids = torch.arange(len(one.train))
    (first, labels), (second, same) = one.train.read(ids), two.train.read(ids)
    assert torch.equal(labels, same)
    if form.kind == "jpeg":
        assert (first.float() - second.float()).abs().mean() < 12
    else:
        assert torch.equal(first, second)


@pytest.mark.parametrize("words", [[], ["--size", "8"], ["--raw", "--size", "8"]])
def test_bad_images_are_listed_all_at_once_or_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    folder = fill(tmp_path / "set" / "train", {**odd_images(), **bad_images()})
    fill(tmp_path / "set" / "val", odd_images())
    (folder / "a" / "nowhere.jpg").symlink_to("nothing")
    (folder / "b" / "folder.jpg").mkdir()
    command = ["data", "pack", str(tmp_path / "set"), str(tmp_path / "pack"), "--shard-mb", "0.01", *words]
    assert run(command) == 1
    told = capsys.readouterr()
    lines = told.out.splitlines()
    wanted = {str(folder / name / file) for name in ("a", "b") for file in bad_images()}
    wanted |= {str(folder / "a" / "nowhere.jpg"), str(folder / "b" / "folder.jpg")}
    assert {line.partition(": unreadable image (")[0] for line in lines} == wanted and len(lines) == 14
    assert all(line.endswith("): repair or remove it") for line in lines)
    assert "14 bad images, so there is no pack: leave them out with --skip-bad" in told.err
    assert not (tmp_path / "pack").exists()

    assert run([*command, "--skip-bad"]) == 0
    told = capsys.readouterr()
    assert "24 train, 24 val images, 14 bad ones left out (skipped.txt)" in told.out
    skipped = (tmp_path / "pack" / "skipped.txt").read_text().splitlines()
    assert len(skipped) == 14 and skipped[0] == "train\ta/bomb.png"
    store = open_store("pack", tmp_path / "pack", {})
    assert len(store.train) == 24 and "14 bad images were left out" in store.warnings[0]
    for name in wanted:
        path = Path(name)
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    if not words:
        assert open_store("folder", tmp_path / "set", {}).facts() == store.facts()
    whole = tmp_path / "whole"
    assert run([*command[:3], str(whole), *command[4:]]) == 0
    shards = [path.name for path in whole.glob("*-*")]
    assert shards and all((tmp_path / "pack" / s).read_bytes() == (whole / s).read_bytes() for s in shards)


def test_a_split_without_one_good_image(tmp_path: Path) -> None:
    fill(tmp_path / "set" / "train", odd_images())
    fill(tmp_path / "set" / "val", {"x.jpg": b"", "y.png": b"?"})
    with pytest.raises(DataError, match=r"val: not one of its 4 images can be read: .*x.jpg: unreadable"):
        write(tmp_path / "set", tmp_path / "pack", skip_bad=True)
    with pytest.raises(DataError, match=r"4 bad images, so there is no pack.*; the first is .*x.jpg"):
        lockstep.pack(tmp_path / "set", tmp_path / "other")


def test_bad_images_at_the_ends_of_shards(tmp_path: Path) -> None:
    good, bad = odd_images()["plain.jpg"], b"?"
    fill(tmp_path / "set" / "train", {f"{i}.jpg": bad if i in (0, 4, 8, 9) else good for i in range(10)})
    fill(tmp_path / "set" / "val", {"x.jpg": good})
    result = write(tmp_path / "set", tmp_path / "pack", skip_bad=True, shard_mb=1e-6)
    assert result.counts == {"train": 12, "val": 2} and len(list((tmp_path / "pack").glob("*.tar"))) == 14
    assert len(open_store("pack", tmp_path / "pack", {}).train) == 12


def test_a_changed_source_or_another_option_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    photos, dest = take_photos(tmp_path / "photos", train=6, val=2), tmp_path / "pack"
    plan = {"shard_mb": 0.005}

    class Stop(Exception):
        pass

    def stop(*_: object) -> None:
        raise Stop

    def begin() -> None:
        shutil.rmtree(tmp_path / "pack.part", ignore_errors=True)
        with monkeypatch.context() as patched, pytest.raises(Stop):
            patched.setattr(writing, "write_indexes", stop)
            write(photos, dest, **plan)

    begin()
    assert list((tmp_path / "pack.part").glob("*.tar")) and not dest.exists()
    again = "remove it to begin anew, or run the command as it was then"
    with pytest.raises(DataError, match=rf"pack.part: was begun with shard_bytes=5000, .* now 6000: {again}"):
        write(photos, dest, shard_mb=0.006)
    with pytest.raises(
        DataError, match=r"was begun with form=\{'kind': 'files'\}, which is now \{'kind': 'raw'"
    ):
        write(photos, dest, form=ImageForm("raw", 8), **plan)
    path = photos / "train" / "red" / "0.jpg"
    data = path.read_bytes()
    path.write_bytes(data)  # the same content, written again
    with pytest.raises(DataError, match=f"was begun from other images than SOURCE has now: {again}"):
        write(photos, dest, **plan)
    begin()
    path.unlink()
    with pytest.raises(DataError, match="was begun from other images than SOURCE has now"):
        write(photos, dest, **plan)
    begin()
    assert write(photos, dest, **plan).is_done and not (tmp_path / "pack.part").exists()


def test_two_processes_do_not_write_one_pack(tmp_path: Path) -> None:
    photos = take_photos(tmp_path / "photos", train=6, val=2)
    source = pack_folder(FolderOptions(), photos)

    def meanwhile(_done: int, _total: int) -> None:
        with pytest.raises(DataError, match=r"pack.part: another process is writing it"):
            write_pack(source, tmp_path / "pack", PackPlan())

    assert write_pack(source, tmp_path / "pack", PackPlan(), meanwhile).is_done


def test_a_full_disk_is_told_before_and_while_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photos = take_photos(tmp_path / "photos", train=6, val=2)
    usage = namedtuple("usage", "free")
    with monkeypatch.context() as patched:
        patched.setattr(writing.shutil, "disk_usage", lambda path: usage(-4_000_000))
        with pytest.raises(DataError, match=r"pack.part: needs about 0 MB more, and -4 MB are free there"):
            write(photos, tmp_path / "pack")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(writing.ShardFile, "finish", fail)
        with pytest.raises(
            DataError, match=r"cannot be written \(No space left on device\): mend that and run"
        ):
            write(photos, tmp_path / "pack")
    assert write(photos, tmp_path / "pack").is_done


def test_names_that_are_not_utf8(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photos = take_photos(tmp_path / "photos", train=3, val=2)
    (photos / "train" / "red" / "0.jpg").rename(photos / "train" / "red" / "\udcff.jpg")
    assert run(["data", "pack", str(photos), str(tmp_path / "pack")]) == 2
    assert r"the name 'red/\udcff.jpg' is not UTF-8: rename it" in capsys.readouterr().err
    (photos / "train" / "red" / "\udcff.jpg").rename(photos / "train" / "red" / "größe\n語.jpg")
    assert run(["data", "pack", str(photos), str(tmp_path / "pack")]) == 0
    one, two = (
        open_store(name, place, {}) for name, place in (("folder", photos), ("pack", tmp_path / "pack"))
    )
    assert one.facts() == two.facts()
