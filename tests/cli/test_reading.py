"""`lockstep bench io`: every way of reading a folder and a pack, and what has nothing to read."""

import json

import pytest
from photos import take_photos

from lockstep.cli.main import run

KEYS = ("data.size=16", "data.augment=random_resized_crop,flip")


def words(*keys):
    return [
        "bench",
        "io",
        "shapes",
        *(word for key in (*keys, *KEYS) for word in ("-o", key)),
        "--images",
        "20",
    ]


def test_a_folder_and_its_pack(tmp_path, capsys):
    photos = take_photos(tmp_path / "photos", train=10, val=1)
    assert run(["data", "pack", str(photos), str(tmp_path / "packed")]) == 0
    capsys.readouterr()
    for name, place in (("folder", photos), ("pack", tmp_path / "packed")):
        assert run([*words(f"data.name={name}", f"data.dir={place}"), "--json"]) == 0
        rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [row["what"] for row in rows[:3]] == [
            "files, cold cache", "files, warm cache", "as training reads",
        ]  # fmt: skip
        assert all(row["images_s"] > 0 for row in rows) and rows[0]["mb_s"] > 0 and rows[2]["mb_s"] is None
    assert run([*words("data.name=folder", f"data.dir={photos}"), "--gpu-rate", "1000"]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    assert last.startswith("this machine feeds ") and last.endswith(" GPUs that train 1,000 img/s each")


@pytest.mark.parametrize(
    ("more", "message"),
    [([], "held in memory"), (["--images", "0"], "--images 0"), (["--gpu-rate", "0"], "--gpu-rate 0")],
)
def test_bad_input(more, message, capsys):
    assert run([*words("data.num_train=20", "data.num_test=5"), *more]) == 2
    assert message in capsys.readouterr().err
