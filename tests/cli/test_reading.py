"""`lockstep bench io`: every way of reading a folder and a pack, and what has nothing to read."""

import json
import re

import pytest
from photos import take_photos
from PIL import Image

from lockstep.cli.main import run
from lockstep.measure.time_by_kind import kind_of

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


def test_a_step_is_drawn_with_its_wait_for_a_slow_disk(tmp_path, capsys):
    photos = take_photos(tmp_path / "photos", train=10, val=1)
    keys = (f"data.dir={photos}", "data.name=folder", "train.batch=8", "train.lanes=2")
    assert run([*words(*keys), "--picture", str(tmp_path / "step.png"), "--slow", "0.01"]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    waits = re.search(
        r"waits for data ([\d.]+) s with this disk, ([\d.]+) s with one held to 0.01 MB/s$", last
    )
    assert float(waits[2]) > 0.3 > float(waits[1])  # 8 images of about 1 KB take most of a second
    with Image.open(tmp_path / "step.png") as picture:
        assert len(picture.convert("RGB").getcolors(1 << 20)) > 20


def test_operations_have_a_kind():
    found = map(kind_of, ("aten::mkldnn_convolution", "aten::addmm", "aten::threshold_backward", "aten::sum"))
    assert list(found) == ["convolution", "fully connected", "activation", "other"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ([], "held in memory"),
        (["--images", "0"], "--images 0"),
        (["--gpu-rate", "0"], "--gpu-rate 0"),
        (["--slow", "0"], "--slow 0"),
    ],
)
def test_bad_input(more, message, capsys):
    assert run([*words("data.num_train=20", "data.num_test=5"), *more]) == 2
    assert message in capsys.readouterr().err
