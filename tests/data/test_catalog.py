"""Data sets by name: what is known, what may be set, and where the files are looked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lockstep.data import Store, open_store
from lockstep.data.catalog import _find, data_names, data_options
from lockstep.errors import DataError


def test_names_and_options() -> None:
    assert data_names() == ("shapes", "mnist", "fashion", "cifar10", "folder")
    assert data_options("shapes") == ("size", "channels", "classes", "num_train", "num_test", "seed")
    assert data_options("mnist") == ()
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
        ("mnist", {"size": 3}, "data.size: unknown key 'size': choose .*; mnist has none of its own"),
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
