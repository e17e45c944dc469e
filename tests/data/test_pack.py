"""Packs: written in every form, read as what they were made of, refused when damaged."""

from __future__ import annotations

import io
import json
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from photos import photo_run, take_photos
from PIL import Image
from small import train

import lockstep
from lockstep.cli.main import run
from lockstep.data import open_store
from lockstep.data.images.folder import FolderOptions
from lockstep.data.pack.find_source import find_source
from lockstep.data.pack.from_folder import pack_folder
from lockstep.data.pack.image_form import ImageForm
from lockstep.data.pack.pack_facts import INDEX_TYPE, hash_file, read_facts
from lockstep.data.pack.pack_set import PackOptions, check_pack, open_pack
from lockstep.data.pack.pack_source import PackSource
from lockstep.data.pack.write_pack import PackPlan, write_pack
from lockstep.data.store import Store
from lockstep.errors import DataError

SMALL = PackPlan(shard_mb=0.01, threads=2)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return take_photos(tmp_path_factory.mktemp("photos"), train=8, val=3, test=2)


def pack(folder: Path, dest: Path, plan: PackPlan = SMALL, **options: float) -> Path:
    result = write_pack(pack_folder(FolderOptions(**options), folder), dest, plan)  # type: ignore[arg-type]
    assert result.is_done and not dest.with_name(f"{dest.name}.part").exists()
    return dest


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*"))}


def read_all(store: Store) -> list[torch.Tensor]:
    splits = [store.train, *store.eval_splits().values()]
    return [part for split in splits for part in split.read(torch.arange(len(split)))]


def test_a_folder_and_its_pack_have_the_same_samples_and_manifest(photos: Path, tmp_path: Path) -> None:
    dest = pack(photos, tmp_path / "pack")
    for options in ({"size": 16}, {"size": 9, "channels": 1}, {}):
        one, two = open_store("folder", photos, options), open_store("pack", dest, options)
        assert one.facts() == two.facts() and one.test_name == two.test_name
        assert all(map(torch.equal, read_all(one), read_all(two)))
    assert len(list(dest.glob("train-*.tar"))) == 6
    names = [json.loads(line) for line in (dest / "train.names.jsonl").read_text().splitlines()]
    assert names[:2] == ["blue/0.jpg", "blue/1.jpg"]


def test_what_is_held_out_stays_so(tmp_path: Path) -> None:
    take_photos(tmp_path, flat=8)
    options = {"val_fraction": 0.3, "seed": 5}
    dest = pack(tmp_path / "flat", tmp_path / "pack", **options)
    one = open_store("folder", tmp_path / "flat", {"size": 16, **options})
    two = open_store("pack", dest, {"size": 16})
    assert one.facts() == two.facts() and list(two.eval_splits()) == ["val"]
    assert all(map(torch.equal, read_all(one), read_all(two)))


def test_a_folder_and_its_pack_train_to_the_same_bits_and_one_goes_on_with_the_other(
    photos: Path, tmp_path: Path
) -> None:
    dest = pack(photos, tmp_path / "pack")
    boxes = "data.augment=random_resized_crop,flip"  # of which only the boxes are read
    ours = photo_run(photos, "data.name=pack", f"data.dir={dest}", "data.size=16", boxes)
    theirs = photo_run(photos, "checkpoint.every_steps=1", boxes)
    by_folder, _ = train(theirs, tmp_path / "folder")
    by_pack, _ = train(ours, tmp_path / "packed")
    assert by_pack.summary["weights_sha256"] == by_folder.summary["weights_sha256"]

    def stop(event: object) -> None:
        if getattr(event, "step", 0) == 2:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        train(theirs, tmp_path / "both", on_event=stop)
    both, _ = train(ours, tmp_path / "both", launch={"resume": "auto"})
    assert both.summary["weights_sha256"] == by_folder.summary["weights_sha256"]
    assert both.summary["identity"] == by_folder.summary["identity"]


def test_shards_are_plain_tar_files_in_the_convention_of_webdataset(photos: Path, tmp_path: Path) -> None:
    dest = pack(photos, tmp_path / "pack")
    names, found = [], {}
    for path in sorted(dest.glob("train-*.tar")):
        with tarfile.open(path, format=tarfile.USTAR_FORMAT) as tar:
            for member in tar:
                assert member.isreg() and (member.mtime, member.uid, member.mode) == (0, 0, 0o644)
                stream = tar.extractfile(member)
                assert stream
                names.append(member.name)
                found[member.name] = stream.read()
    assert names == [f"{i:09d}.{kind}" for i in range(24) for kind in ("jpg", "cls")]
    files = sorted((photos / "train").rglob("*.jpg"), key=lambda path: (path.parent.name, path.name))
    for i, path in enumerate(files):
        assert found[f"{i:09d}.jpg"] == path.read_bytes()
        assert int(found[f"{i:09d}.cls"]) == ("blue", "green", "red").index(path.parent.name)


@pytest.mark.parametrize("form", [ImageForm(), ImageForm("jpeg", 10, 80), ImageForm("raw", 8)])
def test_bytes_do_not_depend_on_the_threads(photos: Path, tmp_path: Path, form: ImageForm) -> None:
    one, four = (
        tree(pack(photos, tmp_path / str(n), PackPlan(form, shard_mb=0.004, threads=n))) for n in (1, 4)
    )
    assert one == four and any(name.startswith("train-000001") for name in one)


def test_raw_pixels_are_those_that_a_folder_gives(photos: Path, tmp_path: Path) -> None:
    dest = pack(photos, tmp_path / "pack", PackPlan(ImageForm("raw", 16), shard_mb=0.005))
    one, two = open_store("folder", photos, {"size": 16}), open_store("pack", dest, {})
    assert two.shape == (3, 16, 16) and two.manifest["name"] == "pack"
    assert all(map(torch.equal, read_all(one), read_all(two)))
    ids = torch.tensor([23, 0, 7, 7])
    assert torch.equal(two.train.read(ids)[0], one.train.read(ids)[0])
    assert np.load(dest / "train-000000.npy").shape[1:] == (16, 16, 3)
    with pytest.raises(
        DataError, match=r"data.size=32: .* holds raw pixels, 3 × 16 × 16: leave data.size out"
    ):
        open_store("pack", dest, {"size": 32})
    index = np.load(dest / "train.index.npy")
    index["offset"][3] += 7
    np.save(dest / "train.index.npy", index)
    with pytest.raises(DataError, match=r"train.index.npy: sample 3 is no image of \(16, 16, 3\) there"):
        open_store("pack", dest, {})
    grey = pack(photos, tmp_path / "grey", PackPlan(ImageForm("raw", 16)), channels=1)
    assert torch.equal(
        read_all(open_store("pack", grey, {}))[0],
        read_all(open_store("folder", photos, {"size": 16, "channels": 1}))[0],
    )


def test_smaller_images_are_jpeg_and_those_small_enough_are_kept(tmp_path: Path) -> None:
    for number, size in enumerate([(60, 40), (40, 90), (20, 20)]):
        for name in ("a", "b"):
            path = tmp_path / "set" / name / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB" if number else "L", size).save(path)
    dest = pack(tmp_path / "set", tmp_path / "pack", PackPlan(ImageForm("jpeg", 20)))
    with tarfile.open(dest / "train-000000.tar") as tar:
        found = {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]
    images = [Image.open(io.BytesIO(data)) for name, data in found.items() if not name.endswith("cls")]
    index = np.load(dest / "train.index.npy")
    assert [image.size for image in images] == [(row["width"], row["height"]) for row in index]
    assert {(image.format, image.mode, image.size) for image in images} <= {
        ("JPEG", "L", (30, 20)), ("JPEG", "RGB", (20, 45)), ("PNG", "RGB", (20, 20)),
    }  # fmt: skip
    assert {image.format for image in images} == {"JPEG", "PNG"}
    manifest = open_store("pack", dest, {}).manifest
    assert manifest["name"] == "pack" and "decoder" in manifest


def test_the_source_of_a_split(photos: Path, tmp_path: Path) -> None:
    dest = pack(photos, tmp_path / "pack")
    split = read_facts(dest).splits["train"]
    source = PackSource(dest, split, np.load(dest / split.index.file, mmap_mode="r"))
    assert len(source) == 24
    assert bytes(source.read(9)) == (photos / "train" / "green" / "1.jpg").read_bytes()
    assert source.where(9) == f"{dest / 'train-000002.tar'}: 000000009.jpg"
    assert source.sizes(torch.tensor([3, 0])).tolist() == [[20, 24]] * 2


def test_the_commands(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dest = tmp_path / "pack"
    assert run(["data", "pack", str(photos), str(dest), "--raw", "--size", "8"]) == 0
    assert f"{dest}: 24 train, 9 val, 6 test images" in capsys.readouterr().out
    assert run(["data", "info", "pack", "--dir", str(dest)]) == 0
    told = capsys.readouterr().out
    assert "pack: 24 training, 9 validation and 6 test images" in told and "3 × 8 × 8" in told
    assert run(["data", "check", "pack", "--dir", str(dest)]) == 0
    assert run(["data", "pack", str(photos), str(dest)]) == 2
    assert "exists: a pack is never overwritten" in capsys.readouterr().err
    assert run(["data", "pack", str(photos), str(photos / "x")]) == 2
    assert "lies in SOURCE" in capsys.readouterr().err
    for words, told in (
        (["--raw"], "--raw: images may have any size"),
        (["--as", "jpeg"], "--size 0: an image needs"),
        (["--as", "files", "--size", "8"], "--size: files are kept as they are"),
        (["--size", "8", "--quality", "0"], "--quality 0: JPEG has 1 to 100"),
        (["--shard-mb", "0"], "--shard-mb 0.0: must be above 0"),
        (["--threads", "0"], "--threads 0: at least 1"),
        (["-o", "train.batch=3"], "-o train: data pack takes keys of data only"),
    ):
        assert run(["data", "pack", str(photos), str(tmp_path / "new"), *words]) == 2
        assert told in capsys.readouterr().err
    assert run(["data", "pack", str(tmp_path / "nowhere"), str(tmp_path / "new")]) == 2
    assert "no such folder or file, and no published set" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_damage_is_told_at_opening_or_by_the_check(photos: Path, tmp_path: Path) -> None:
    dest = pack(photos, tmp_path / "pack")

    def faults() -> list[str]:
        return check_pack(PackOptions(), dest, lambda done, total: None)

    def refused(match: str) -> None:
        with pytest.raises(DataError, match=match):
            open_pack(PackOptions(), dest)

    assert faults() == []
    shard, other = dest / "train-000001.tar", dest / "val-000000.tar"
    whole, kept = shard.read_bytes(), other.read_bytes()
    shard.write_bytes(whole[:-700])
    other.write_bytes(kept[:600] + b"\0" + kept[601:])
    refused(r"train-000001.tar: truncated: 10,\d+ bytes, pack.json says 11,\d+: copy the pack again")
    assert [line.partition(": ")[2][:9] for line in faults()] == ["truncated", "damaged: "]
    shard.unlink()
    refused(r"train-000001.tar: is missing: copy the pack again or make it anew")
    shard.write_bytes(whole)
    other.write_bytes(kept)

    path = dest / "train.index.npy"
    index = np.load(path)
    for key, value, told in (
        ("offset", 1 << 40, "lies outside its shard"),
        ("length", 1 << 63, "lies outside its shard"),
        ("length", 0, "has no bytes"),
        ("label", 7, "has a label that is not 0 to 2"),
        ("height", 0, "has no pixels"),
        ("shard", 9, "is in a shard that is not there"),
    ):
        wrong = index.copy()
        wrong[5][key] = value
        np.save(path, wrong)
        refused(f"train.index.npy: sample 5 {told}: copy the pack again")
        assert "SHA-256" in faults()[0]
    np.save(path, index)
    data = path.read_bytes()
    path.write_bytes(data[:10] + b"(" * 20 + data[30:])
    refused(r"train.index.npy: no array \(.*\): copy the pack again")
    np.save(path, index[:-1])
    refused(r"train.index.npy: truncated")
    table = json.loads((dest / "pack.json").read_text())
    table["splits"]["train"]["index"] = vars(hash_file(path))
    (dest / "pack.json").write_text(json.dumps(table))
    refused(r"train.index.npy: an index of \(23,\) .* says 24 samples")
    assert len(faults()) == 1

    (dest / "pack.json").write_text(json.dumps({**table, "version": 2}))
    refused(r"pack.json: a pack of version 2, this Lockstep reads version 1")
    table["splits"]["train"]["shards"][0]["file"] = "../elsewhere"
    (dest / "pack.json").write_text(json.dumps(table))
    refused(r"pack.json: damaged \(ValueError: '../elsewhere' is no name of a file\)")
    for key, value, told in (
        ("splits", {}, r"has splits : needs train, and val or test"),
        ("form", {"kind": "raw"}, r"damaged \(ValueError: shape None\)"),
        ("shape", [8, 8], r"damaged \(ValueError: shape \(8, 8\)\)"),
        ("other", 1, r"damaged \(TypeError: .*'other'\)"),
        ("classes", None, r"damaged \(TypeError: .*NoneType"),
    ):
        table["splits"]["train"]["shards"][0]["file"] = "train-000000.tar"
        (dest / "pack.json").write_text(json.dumps({**table, key: value}))
        refused(told)
    (dest / "pack.json").write_text("{")
    refused(r"pack.json: damaged")
    (dest / "pack.json").unlink()
    refused(r"pack.json: there is none, so .* is no pack")
    assert INDEX_TYPE.itemsize == 32


def test_a_pack_in_python(tmp_path: Path) -> None:
    class Squares:
        classes = ("even", "odd")
        targets = tuple(i % 2 for i in range(40))

        def __len__(self) -> int:
            return 40

        def __getitem__(self, i: int) -> tuple[np.ndarray, int]:
            return np.full((6, 7, 3), i, dtype=np.uint8), i % 2

    assert lockstep.pack((Squares(), Squares()), tmp_path / "png").counts == {"train": 40, "test": 40}
    lockstep.pack(Squares(), tmp_path / "raw", raw=True)
    png, raw = (open_store("pack", tmp_path / name, {}) for name in ("png", "raw"))
    assert png.classes == ("even", "odd") and png.shape == (3, 64, 64) and raw.shape == (3, 6, 7)
    images, labels = png.test.read(torch.arange(40))
    assert torch.equal(images[:, 0, 3, 3], torch.arange(40)) and labels[:3].tolist() == [0, 1, 0]
    assert len(raw.train) + len(raw.test) == 40


def test_a_published_set(tmp_path: Path) -> None:
    options = {"num_train": 40, "num_test": 9, "size": 12}
    source = find_source("shapes", options)
    one = open_store("shapes", None, options)
    for kind in ("files", "raw"):
        write_pack(source, tmp_path / kind, PackPlan(ImageForm(kind)))
        two = open_store("pack", tmp_path / kind, {})
        assert (one.shape, one.classes, one.mean, one.std) == (two.shape, two.classes, two.mean, two.std)
        assert all(map(torch.equal, read_all(one), read_all(two)))


def test_mnist_by_name(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (12, 9, 9), dtype=np.uint8)
    for part, count in (("train", 12), ("t10k", 5)):
        head = struct.pack(">4I", 0x0803, count, 9, 9)
        (tmp_path / f"{part}-images-idx3-ubyte").write_bytes(head + pixels[:count].tobytes())
        labels = bytes(i % 10 for i in range(count))
        (tmp_path / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">2I", 0x0801, count) + labels)
    one = open_store("mnist", tmp_path, {})
    for words in ([], ["--raw"]):
        dest = tmp_path / f"pack{len(words)}"
        assert run(["data", "pack", "mnist", str(dest), "-o", f"data.dir={tmp_path}", *words]) == 0
        two = open_store("pack", dest, {})
        assert (one.shape, one.classes, one.mean) == (two.shape, two.classes, two.mean)
        assert all(map(torch.equal, read_all(one), read_all(two)))
