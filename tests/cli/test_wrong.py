"""`lockstep eval --wrong`: the page against the model's own outputs, its images, and what it says of them."""

import base64
import io
import json
import re
from html import unescape

import pytest
import torch
from page_reader import Reader
from photos import photo_run, take_photos
from PIL import Image
from small import small_run, train

from lockstep.cli.main import run
from lockstep.data import open_data
from lockstep.runs.trained_run import open_trained


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """A run on a folder, which is wrong often: it learns hardly anything."""
    folder = tmp_path_factory.mktemp("photos")
    keys = ("optimizer.lr=1e-6", "train.epochs=1")
    return train(photo_run(take_photos(folder / "data", train=8, val=9), *keys), folder / "runs")[0]


def written(result, path, capsys, *more):
    assert run(["eval", str(result.directory), "--device", "cpu", "--wrong", str(path), *more]) == 0
    return path.read_text(), capsys.readouterr().out


def outputs(result):
    """Of every image: its label, the class it is taken for, and the probability of each."""
    opened = open_trained(result.directory.parent, "run", device="cpu")
    split = open_data(opened.run).test
    images, labels = split.read(torch.arange(len(split)))
    with torch.no_grad():
        shares = opened.model.eval()(opened.augment.normalize(images)).softmax(1)
    taken = shares.argmax(1)
    rows = torch.arange(len(split))
    return images, labels, taken, shares[rows, taken], shares[rows, labels]


def test_every_wrong_image_is_shown_the_surest_first(photos, tmp_path, capsys):
    page, said = written(photos, tmp_path / "wrong.html", capsys)
    images, labels, taken, sure, of_label = outputs(photos)
    wrong = (labels != taken).nonzero().flatten()
    order = wrong[sure[wrong].argsort(descending=True)].tolist()
    assert len(order) > 5
    classes = ("blue", "green", "red")
    shown = page.split('id="wrong"')[1].split("</section>")[0]
    texts = [unescape(text) for text in re.findall(r"<span>([^<]*)</span>", shown)]
    assert texts[::2] == [f"{classes[labels[i]]} taken for {classes[taken[i]]}" for i in order]
    assert texts[1::2] == [f"{100 * sure[i]:.1f} % (label {100 * of_label[i]:.1f} %)" for i in order]
    names = re.findall(r'title="([^"]*)"', shown)
    assert all(name.split("/")[0] == classes[labels[i]] for name, i in zip(names, order, strict=True))
    jpegs = re.findall(r"base64,([^\"]*)", shown)
    pixels = Image.open(io.BytesIO(base64.b64decode(jpegs[0])))
    near = torch.tensor([pixels.getpixel((x, y)) for y in range(16) for x in range(16)]).float() - images[
        order[0]
    ].permute(1, 2, 0).reshape(-1, 3)
    assert pixels.size == (16, 16) and near.abs().mean() < 16  # a JPEG of it
    first = Reader(page).tables[0][1]
    assert f"  {first[0]} taken for {first[1]}: {first[2]}" in said
    assert f"{len(order)} of 27 images of val are wrong" in page
    assert "http" not in page.lower().replace("http-equiv", "")


def test_pairs_and_classes_add_up(photos, tmp_path, capsys):
    page, said = written(photos, tmp_path / "wrong.html", capsys, "--json")
    _, labels, taken, *_ = outputs(photos)
    found = json.loads(said)
    assert sum(row["samples"] for row in found["confused"]) == int((labels != taken).sum())
    counts = [row["samples"] for row in found["confused"]]
    assert counts == sorted(counts, reverse=True)
    pairs, classes = Reader(page).tables
    assert [row[:3] for row in pairs[1:]] == [
        [row["class"], row["taken_for"], str(row["samples"])] for row in found["confused"]
    ]
    assert len(classes) == 4 and sum(int(row[1]) for row in classes[1:]) == 27


def test_the_number_of_images_is_bounded_and_names_are_escaped(tmp_path, capsys):
    keys = (
        "data.classes=20",
        "data.num_test=400",
        "train.epochs=1",
        "optimizer.lr=1e-6",
        "data.num_train=64",
    )
    result, _ = train(small_run(*keys), tmp_path)
    page, _ = written(result, tmp_path / "wrong.html", capsys)
    assert 48 < page.count("<img") <= 108 and len(page) < 400_000
    assert "image " in page and Reader(page).tables[0][-1]


def test_a_file_that_exists_is_kept(photos, tmp_path, capsys):
    path = tmp_path / "wrong.html"
    path.write_text("mine")
    assert run(["eval", str(photos.directory), "--wrong", str(path)]) == 2
    assert "--wrong" in capsys.readouterr().err and path.read_text() == "mine"
    assert run(["eval", str(photos.directory), "--wrong", str(tmp_path / "wrong.png")]) == 2
    assert "name it wrong.html" in capsys.readouterr().err
