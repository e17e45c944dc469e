"""Data sets by name: what is known, what may be set, and where the files are looked for."""

from __future__ import annotations

import argparse
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import lockstep.data
from lockstep.cli.main import make_parser
from lockstep.data import Store, open_store
from lockstep.data.catalog import _ENTRIES, _find, data_names, data_options, find_files
from lockstep.errors import DataError


def test_names_and_options() -> None:
    assert data_names() == ("shapes", "mnist", "fashion", "cifar10", "folder", "csv", "pack")
    known = ("size", "channels", "classes", "num_train", "num_test", "seed", "num_val")
    assert data_options("shapes") == known
    assert data_options("mnist") == ("val_fraction", "seed")
    assert data_names(fetchable=True) == tuple(name for name in data_names() if _find(name).published)


def test_options_reach_the_set() -> None:
    store = open_store("shapes", None, {"num_train": 50, "num_test": 20, "classes": 4})
    assert isinstance(store, Store) and (len(store.train), len(store.test)) == (50, 20)
    assert {key: store.manifest[key] for key in ("name", "classes", "num_train", "num_test")} == {
        "name": "shapes",
        "classes": 4,
        "num_train": 50,
        "num_test": 20,
    }


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("shape", {}, "unknown data set 'shape': did you mean 'shapes'"),
        ("shapes", {"clases": 3}, "data.clases: unknown key 'clases': did you mean 'classes'"),
        (
            "mnist",
            {"size": 3},
            "data.size: unknown key 'size': .*choose from augment, dir, name, normalize, order",
        ),
        ("shapes", {"size": "big"}, "data.size='big': must be an int, not a str; the default is 28"),
        ("shapes", {"size": 28.5}, "data.size=28.5: must be an int, not a float"),
        ("shapes", {"seed": True}, "data.seed=True: must be an int, not a bool"),
        ("folder", {"val_fraction": "x"}, "data.val_fraction='x': must be a float, not a str"),
        ("shapes", {"classes": 50}, "data.classes=50: shapes has 20 figures; choose 2 to 20"),
    ],
)
def test_bad_requests_are_named(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        open_store(name, None, options)


def test_missing_folders_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        DataError, match=r"data.dir=data/fashion: .* `lockstep data get fashion --dir data/fashion`"
    ):
        open_store("fashion", None, {})
    with pytest.raises(DataError, match=r"data.dir=nowhere: no such folder: set data.dir"):
        open_store("folder", Path("nowhere"), {})
    Path("file").write_text("")
    with pytest.raises(DataError, match=r"data.dir=file: not a folder"):
        open_store("folder", Path("file"), {})


CIFAR10 = (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin")


def write(folder: Path, contents: dict[str, bytes]) -> None:
    folder.mkdir(parents=True)
    for name, content in contents.items():
        (folder / name).write_bytes(content)


def fashion(count: int) -> dict[str, bytes]:
    """The four files, of so many images each."""
    images = struct.pack(">4I", 0x0803, count, 2, 2) + bytes(4 * count)
    labels = struct.pack(">2I", 0x0801, count) + bytes(count)
    both = {"images-idx3": images, "labels-idx1": labels}
    return {f"{part}-{what}-ubyte": both[what] for part in ("train", "t10k") for what in both}


@pytest.mark.parametrize(
    "below", ["", "cifar10", "cifar-10-batches-bin", "cifar10/cifar-10-batches-bin", "CIFAR_10"]
)
def test_cifar10_is_found_where_it_may_lie(tmp_path: Path, below: str) -> None:
    write(tmp_path / "data" / below, dict.fromkeys(CIFAR10, bytes(2 * 3073)))
    assert find_files("cifar10", tmp_path / "data") == tmp_path / "data" / below
    assert len(open_store("cifar10", tmp_path / "data", {}).train) == 10


def test_usual_places_are_looked_through_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_files("fashion", None) is None
    write(Path("data/fashion-mnist"), fashion(7))
    assert find_files("fashion", None) == find_files("fashion", Path("data")) == Path("data/fashion-mnist")
    assert len(open_store("fashion", None, {}).train) == 7
    write(Path("data/fashion"), fashion(8))  # where `data get` puts it
    assert (
        find_files("fashion", None) == Path("data/fashion")
        and len(open_store("fashion", None, {}).train) == 8
    )


def test_an_entry_is_all_that_a_new_data_set_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
from pathlib import Path
from lockstep.data.data_set import DataSet
from lockstep.data.shapes import ShapesOptions, open_shapes
DATA_SETS = (DataSet("tiny", ShapesOptions, generate=open_shapes),)
"""
    (tmp_path / "tiny_set.py").write_text(code)
    monkeypatch.setattr(lockstep.data, "__path__", [*lockstep.data.__path__, str(tmp_path)])
    monkeypatch.setitem(_ENTRIES, "tiny", replace(_ENTRIES["shapes"], file="tiny_set"))
    assert "tiny" in data_names() and len(open_store("tiny", None, {"num_train": 5}).train) == 5
    action = next(a for a in make_parser()._actions if isinstance(a, argparse._SubParsersAction))
    info = next(a for a in action.choices["data"]._actions if isinstance(a, argparse._SubParsersAction))
    assert "pack or tiny" in " ".join(info.choices["info"].format_help().split())
