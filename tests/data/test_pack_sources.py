"""Packs of what others made: tar shards in WebDataset's convention, and Hugging Face's Parquet files."""

from __future__ import annotations

import io
import json
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lockstep.cli.main import run
from lockstep.data import open_store
from lockstep.data.pack.find_source import find_source
from lockstep.data.pack.write_pack import PackPlan, write_pack
from lockstep.errors import DataError


def picture(value: int, format: str = "JPEG") -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (12, 10), (value, value, value)).save(stream, format)
    return stream.getvalue()


def make_tar(path: Path, members: dict[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def samples(first: int, count: int, classes: int = 3) -> dict[str, bytes]:
    found = {}
    for i in range(first, first + count):
        found[f"some/dir/{i:04d}.{'jpg' if i % 2 else 'png'}"] = picture(i * 3, "JPEG" if i % 2 else "PNG")
        if i % 4:
            found[f"some/dir/{i:04d}.cls"] = str(i % classes).encode()
        else:
            found[f"some/dir/{i:04d}.json"] = json.dumps({"label": i % classes, "more": 1}).encode()
        found[f"some/dir/{i:04d}.seg.txt"] = b"not used"
    return found


def check(dest: Path, num_train: int, classes: tuple[str, ...]) -> None:
    store = open_store("pack", dest, {"size": 8})
    assert store.classes == classes and len(store.train) == num_train
    images, labels = store.train.read(torch.arange(num_train))
    assert labels.tolist() == [i % 3 for i in range(num_train)]
    assert (images[:, 0, 4, 4].int() - 3 * torch.arange(num_train)).abs().max() <= 2  # in their order


def test_tar_shards_of_others(tmp_path: Path) -> None:
    make_tar(tmp_path / "set" / "some-train-000000.tar", samples(0, 7))
    make_tar(tmp_path / "set" / "some-train-000001.tar", samples(7, 5))
    make_tar(tmp_path / "set" / "some-val-000000.tar", samples(0, 3))
    for number, source in enumerate((tmp_path / "set", tmp_path / "set" / "*.tar")):
        dest = tmp_path / f"pack{number}"
        assert write_pack(find_source(str(source), {}), dest, PackPlan()).is_done
        check(dest, 12, ("0", "1", "2"))
    names = (dest / "train.names.jsonl").read_text().splitlines()
    assert names[0] == '"some/dir/0000"'
    (tmp_path / "names.txt").write_text("x\ny\nz\n")
    words = ["data", "pack", str(tmp_path / "set"), str(tmp_path / "named")]
    assert run([*words, "--classes", str(tmp_path / "names.txt")]) == 0
    check(tmp_path / "named", 12, ("x", "y", "z"))
    again = find_source(str(tmp_path / "named"), {})  # a pack of ours keeps the names of its classes
    assert again.classes == ("x", "y", "z")
    assert write_pack(again, tmp_path / "again", PackPlan()).is_done
    shard = "train-000000.tar"
    assert (tmp_path / "again" / shard).read_bytes() == (tmp_path / "named" / shard).read_bytes()


def test_some_are_held_out_if_no_file_says_its_split(tmp_path: Path) -> None:
    for number in range(3):
        make_tar(tmp_path / "set" / f"{number}.tar", samples(20 * number, 20))
    source = find_source(str(tmp_path / "set"), {})
    assert len(source.splits["train"]) + len(source.splits["val"]) == 60 > len(source.splits["train"]) > 40
    assert not set(source.splits["train"].names) & set(source.splits["val"].names)


@pytest.mark.parametrize(
    ("members", "told"),
    [
        (
            {"7.jpg": picture(1), "7.cls": b"7"},
            r"7.jpg: label 7: must be 0 to 3, as there are 4 classes, so labels",
        ),
        (
            {"7.jpg": picture(1), "7.cls": b"cat"},
            r"7.cls: b'cat' is no number: must be the number of a class",
        ),
        ({"7.jpg": picture(1), "7.cls": b""}, r"7.cls: b'' is no number"),
        ({"7.jpg": picture(1), "7.cls": b"\xff"}, r"7.cls: b'\\xff' is no number"),
        ({"7.jpg": picture(1), "7.cls": b"-1"}, r"7.jpg: label -1: must be 0 to"),
        ({"7.jpg": picture(1), "7.json": b'{"label": "cat"}'}, r"7.json: no label \('cat' is no integer\)"),
        ({"7.jpg": picture(1), "7.json": b'{"class": 1}'}, r"7.json: no label \('label'\)"),
        ({"7.jpg": picture(1), "7.json": b"[1]"}, r"7.json: no label"),
        ({"7.jpg": picture(1)}, r"7.jpg: has no 7.cls or .json with its label"),
        ({"7.jpg": picture(1), "7.png": picture(1), "7.cls": b"1"}, r"7.png: a second image of 7: keep one"),
    ],
)
def test_tar_shards_that_cannot_be_used(tmp_path: Path, members: dict[str, bytes], told: str) -> None:
    make_tar(tmp_path / "train.tar", {**samples(0, 6), **members})
    make_tar(tmp_path / "val.tar", samples(0, 3))
    with pytest.raises(DataError, match=rf"train.tar: {told}"):
        find_source(str(tmp_path), {})


def test_other_faults_of_tar_files(tmp_path: Path) -> None:
    path = make_tar(tmp_path / "a" / "train.tar", samples(0, 6))
    (tmp_path / "two.txt").write_text("x\ny\n")
    with pytest.raises(DataError, match=r"label 2: must be 0 to 1, as 2 classes are named"):
        find_source(str(path), {}, tmp_path / "two.txt")
    with pytest.raises(DataError, match=r"--classes .*none: cannot be read"):
        find_source(str(path), {}, tmp_path / "none")
    with pytest.raises(DataError, match=r"-o data.seed: .tar files have no such key"):
        find_source(str(path), {"seed": 1})
    path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(
        DataError, match=r"train.tar: not a whole tar file \(.*\): fetch it again or remove it"
    ):
        find_source(str(path), {})
    path.write_bytes(b"x" * 3000)
    with pytest.raises(DataError, match=r"train.tar: not a whole tar file"):
        find_source(str(path), {})
    make_tar(path, {"a.txt": b"1"})
    with pytest.raises(DataError, match=r"its train tar files hold no .png, .jpg, .jpeg"):
        find_source(str(path), {})
    make_tar(tmp_path / "a" / "other.tar", samples(0, 2))
    with pytest.raises(DataError, match=r"other.tar: its name has none of the words train, val and test"):
        find_source(str(tmp_path / "a"), {})
    make_tar(tmp_path / "b" / "val.tar", samples(0, 2))
    with pytest.raises(DataError, match=r"b: there is val but no train"):
        find_source(str(tmp_path / "b"), {})
    with pytest.raises(DataError, match=r"two.txt: is no folder, and names no .tar or .parquet file"):
        find_source(str(tmp_path / "two.txt"), {})


def make_parquet(path: Path, first: int, count: int, names: bool = False, struct: bool = True) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    images = [picture(3 * i, "PNG") for i in range(first, first + count)]
    rows = [{"bytes": data, "path": f"{i}.png"} for i, data in enumerate(images)]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())]) if struct else pa.binary()
    table = pa.table(
        {
            "image": pa.array(rows if struct else images, kind),
            "label": pa.array([i % 3 for i in range(first, first + count)], pa.int64()),
        }
    )
    if names:
        info = {"info": {"features": {"label": {"names": ["x", "y", "z"], "_type": "ClassLabel"}}}}
        table = table.replace_schema_metadata({"huggingface": json.dumps(info)})
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(table, path, row_group_size=4)


@pytest.mark.parametrize("struct", [True, False])
def test_parquet_files(tmp_path: Path, struct: bool) -> None:
    data = tmp_path / "set" / "data"
    make_parquet(data / "train-00000-of-00002.parquet", 0, 10, names=struct, struct=struct)
    make_parquet(data / "train-00001-of-00002.parquet", 10, 20, names=struct, struct=struct)
    make_parquet(data / "validation-00000-of-00001.parquet", 0, 5, names=struct, struct=struct)
    assert run(["data", "pack", str(data), str(tmp_path / "pack"), "--threads", "4"]) == 0
    check(tmp_path / "pack", 30, ("x", "y", "z") if struct else ("0", "1", "2"))


def test_parquet_files_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "train.parquet"
    parquet.write_table(pa.table({"image": [picture(1)] * 3, "fine": [0, 1, 2]}), path)
    with pytest.raises(DataError, match=r"has columns image, fine, and needs image and label"):
        find_source(str(path), {})
    parquet.write_table(pa.table({"image": [picture(1)] * 3, "label": ["a", "b", "c"]}), path)
    with pytest.raises(DataError, match=r"labels must be integers, not string with 0 missing"):
        find_source(str(path), {})
    parquet.write_table(pa.table({"image": [picture(1), None] * 9, "label": [0, 1] * 9}), path)
    result = write_pack(find_source(str(path), {}), tmp_path / "pack", PackPlan())
    assert len(result.bad) == 9 and "train.parquet: row 1: unreadable image (no bytes in" in "".join(
        result.bad
    )
    path.write_bytes(b"PAR1 and no more")
    with pytest.raises(DataError, match=r"train.parquet: no Parquet file of images"):
        find_source(str(path), {})
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(
        DataError, match=r"Parquet files need pyarrow: pip install 'lockstep-train\[parquet\]'"
    ):
        find_source(str(path), {})


def test_data_that_is_no_bytes_is_refused() -> None:
    from lockstep.data.pack.from_store import pack_store

    floats = [(np.zeros((4, 4, 3), np.float32), i % 2) for i in range(20)]
    with pytest.raises(DataError, match=r"list: images are torch.float32: a pack holds bytes"):
        pack_store(floats)
