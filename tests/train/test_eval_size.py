"""Evaluation at a size of its own: what it reads, one result by any number of workers, what is refused."""

import json

import forked
import numpy as np
import pytest
import torch
from photos import photo_run, take_photos
from PIL import Image
from plan_runs import hashes
from small import as_worker, command, summary, train

import lockstep
from lockstep.cli.main import run as call_lockstep
from lockstep.data import open_data
from lockstep.data.decoding.decode import fit_image
from lockstep.data.pack.find_source import pack_data
from lockstep.errors import DataError, ModelError
from lockstep.spec.run_file import dump_toml

RESNET = ("model.name=resnet18", "data.size=8", "data.eval_size=16", "data.crop_pct=0.8", "train.epochs=1")


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return take_photos(tmp_path_factory.mktemp("photos"), train=4, val=3)


def start(runs, *flags):
    """`lockstep train` of the run in runs/run.toml."""
    options = ("--runs-dir", str(runs), "--name", "run", "--device", "cpu", "--quiet")
    return command("train", "-c", str(runs / "run.toml"), *options, *flags)


@pytest.fixture(scope="module")
def trained(photos, tmp_path_factory):
    return train(photo_run(photos, *RESNET), tmp_path_factory.mktemp("runs"))[0].directory


def test_size_and_share(photos):
    store = open_data(photo_run(photos, *RESNET))
    first = torch.zeros(1, dtype=torch.int64)
    assert store.train.read(first)[0].shape[1:] == store.shape == (3, 8, 8)
    image = store.test.read(first)[0][0]
    assert image.shape == store.eval_shape == (3, 16, 16)
    path = sorted((photos / "val").rglob("*.jpg"))[0]
    pixels = Image.open(path).convert("RGB")  # 24 × 20: the box has 20 × 20, its middle share 16 × 16
    assert np.array_equal(image.permute(1, 2, 0).numpy(), np.asarray(pixels.crop((4, 2, 20, 18))))


def test_share_of_an_image_that_fits(tmp_path):
    """An image that has the wanted size already is resized, too, if only a share is taken."""
    path = tmp_path / "image.png"
    Image.fromarray(np.arange(192, dtype=np.uint8).reshape(8, 8, 3)).save(path)
    whole, part = np.empty((3, 8, 8), np.uint8), np.empty((3, 8, 8), np.uint8)
    fit_image(path.read_bytes(), whole)
    fit_image(path.read_bytes(), part, 0.5)
    assert not np.array_equal(whole, part)


@pytest.mark.parametrize("form", [{}, {"raw": True, "size": 20}], ids=["files", "raw"])
def test_packs(form, photos, trained, tmp_path):
    pack_data(photos, tmp_path / "packed", **form)
    keys = ("data.name=pack", f"data.dir={tmp_path / 'packed'}", *RESNET)
    store, folder = open_data(photo_run(photos, *keys)), open_data(photo_run(photos, *RESNET))
    found = store.test.read(torch.arange(9))[0]
    assert found.shape == (9, 3, 16, 16) and store.eval_shape == (3, 16, 16)
    if not form:
        assert torch.equal(found, folder.test.read(torch.arange(9))[0]) and store.facts() == folder.facts()
    else:
        with pytest.raises(DataError, match=r"^data.eval_size=24: .* holds raw pixels, 3 × 20 × 20"):
            open_data(photo_run(photos, *keys, "data.eval_size=24"))


def test_use_of_the_run(photos, trained, capsys):
    loss = summary(trained)["loss"]
    assert lockstep.evaluate(trained, device="cpu").loss == pytest.approx(loss, rel=1e-6)
    assert (
        call_lockstep(["eval", str(trained), "--other-data", str(photos), "--device", "cpu", "--json"]) == 0
    )
    assert json.loads(capsys.readouterr().out)["loss"] == pytest.approx(loss, rel=1e-6)
    predict = lockstep.predictor(trained, device="cpu")
    assert predict(torch.zeros(2, 3, 16, 16, dtype=torch.uint8)).shape == (2, 3)
    image = sorted((photos / "val").rglob("*.jpg"))[0]
    assert call_lockstep(["predict", str(trained), str(image), "--device", "cpu"]) == 0
    assert "to 16×16" in capsys.readouterr().err


def test_training_is_the_same(photos, trained, tmp_path):
    train(photo_run(photos, *RESNET, "data.eval_size=8", "data.crop_pct=1.0"), tmp_path)
    same, other = summary(trained), summary(tmp_path / "run")
    assert same["weights_sha256"] == other["weights_sha256"] and same["loss"] != other["loss"]


@pytest.mark.gloo
@pytest.mark.parametrize("flags", [("--workers", "2"), ("--plan", "pipeline=2")], ids=" ".join)
def test_one_result(flags, photos, trained, tmp_path):
    (tmp_path / "run.toml").write_text(dump_toml(photo_run(photos, *RESNET)))
    done = forked.call(start(tmp_path, *flags), launches=True)
    assert done.returncode == 0, done.stderr
    assert hashes(tmp_path / "run") == hashes(trained)


@pytest.mark.parametrize(
    ("keys", "error", "text"),
    [
        (("data.eval_size=24",), ModelError, r"^data.eval_size=24: the model is built for images of 16x16 "),
        (("data.eval_size=-1",), DataError, r"^data.eval_size=-1: must be 0 "),
        (("data.eval_size=99999",), DataError, r"^data.eval_size=99999: an image has at most"),
        (("data.crop_pct=0.0",), DataError, r"^data.crop_pct=0.0: must be above 0 and at most 1"),
        (("data.crop_pct=1.5",), DataError, r"^data.crop_pct=1.5: must be above 0 and at most 1"),
    ],
)
def test_refused(keys, error, text, photos, tmp_path):
    with pytest.raises(error, match=text) as caught:
        train(photo_run(photos, *keys), tmp_path, by=as_worker)
    assert "\n" not in str(caught.value) and not list(tmp_path.iterdir())
