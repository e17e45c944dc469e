"""`lockstep eval --by-class --confusion`: counts by label and prediction against the model's own outputs."""

import json

import pytest
import torch
from PIL import Image
from small import small_run, train

from lockstep.cli.main import run
from lockstep.data import open_data
from lockstep.runs.trained_run import open_trained


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    keys = ("data.classes=7", "train.epochs=1", "data.num_test=41")  # the last block is not full
    return train(small_run(*keys), tmp_path_factory.mktemp("runs"))[0]


def words(trained, *more):
    return ["eval", str(trained.directory), "--device", "cpu", *more]


def test_every_image_is_counted_once(trained, capsys, tmp_path):
    picture = tmp_path / "confusion.png"
    assert run(words(trained, "--by-class", "--confusion", str(picture), "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    opened = open_trained(trained.directory.parent, "run", device="cpu")
    images, labels = open_data(opened.run).test.read(torch.arange(41))
    with torch.no_grad():
        logits = opened.model.eval()(opened.augment.normalize(images))
    best = logits.topk(5).indices
    assert found["top5_accuracy"] == (best == labels[:, None]).any(1).double().mean().item()
    assert sum(row["samples"] for row in found["classes"]) == 41
    for number, row in enumerate(found["classes"]):
        mine = labels == number
        assert row["samples"] == int(mine.sum())
        assert row["accuracy"] == pytest.approx((logits.argmax(1) == labels)[mine].double().mean().item())
    total = sum(row["accuracy"] * row["samples"] for row in found["classes"])
    assert total / 41 == pytest.approx(found["accuracy"])
    with Image.open(picture) as image:
        assert image.width > 300
    assert run(words(trained, "--confusion", str(picture))) == 2
    assert "there is such a file" in capsys.readouterr().err


def test_the_table_has_the_worst_class_first(trained, capsys):
    assert run(words(trained, "--by-class")) == 0
    first, top, *rows = capsys.readouterr().out.splitlines()
    assert "test accuracy" in first and top.startswith("top-5 accuracy") and len(rows) == 7
    shares = [float(row.split()[1]) for row in rows]
    assert shares == sorted(shares)


def test_it_is_for_one_process(trained, capsys):
    assert run(words(trained, "--by-class", "--workers", "1")) == 0
    capsys.readouterr()
