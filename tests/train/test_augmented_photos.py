"""Photographs with every augmentation on: one hash by any number of workers, any plan, and resumed."""

import json

import forked
import pytest
from photos import take_photos
from plan_runs import hashes
from small import command

ITEMS = (
    "random_resized_crop:0.3:1,rand_augment:1:9,trivial_augment,color_jitter,grayscale,gaussian_blur:0.3,"
    "random_erasing,flip,crop,cutout,mixup,cutmix"
)
KEYS = (
    "train.epochs=2",
    "train.batch=8",
    "train.lanes=4",
    "data.size=16",
    "checkpoint.every_steps=1",
    "data.order=blocks:3",
)
pytestmark = pytest.mark.gloo


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return take_photos(tmp_path_factory.mktemp("photos"), train=8, val=2)


def train_photos(photos, runs, *flags, keys=()):
    """`lockstep train` on them as a user does."""
    given = ("data.name=folder", f"data.dir={photos}", f"data.augment={ITEMS}", *KEYS, *keys)
    words = [word for key in given for word in ("-o", key)]
    started = command("train", "--runs-dir", str(runs), "--name", "run", "--device", "cpu", *words, *flags)
    return forked.call(started, launches=True)


@pytest.fixture(scope="module")
def alone(photos, tmp_path_factory):
    runs = tmp_path_factory.mktemp("alone")
    done = train_photos(photos, runs, "--decode-threads", "1", "--read-ahead", "1")
    assert done.returncode == 0, done.stderr
    return hashes(runs / "run")


@pytest.mark.parametrize(
    "flags",
    [
        ("--workers", "2"),
        ("--workers", "3", "--read-ahead", "5"),
        ("--workers", "4"),
        ("--plan", "pipeline=2"),
    ],
    ids=" ".join,
)
def test_one_hash(flags, photos, alone, tmp_path):
    done = train_photos(photos, tmp_path, *flags)
    assert done.returncode == 0, done.stderr
    assert hashes(tmp_path / "run") == alone


def test_resumed_in_an_epoch(photos, alone, tmp_path):
    assert train_photos(photos, tmp_path, keys=("checkpoint.keep=99",)).returncode == 0
    run = tmp_path / "run"
    (run / "summary.json").unlink()
    for path in sorted((run / "checkpoints").glob("step-*"))[2:]:
        path.unlink()
    done = train_photos(
        photos, tmp_path, "--resume", str(run), "--workers", "2", keys=("checkpoint.keep=99",)
    )
    assert done.returncode == 0, done.stderr
    assert hashes(run)["weights_sha256"] == alone["weights_sha256"]


def test_every_item_changes_the_images(photos, alone, tmp_path):
    """Each is drawn: without it the weights are others."""
    for item in ("random_resized_crop:0.3:1", "color_jitter", "mixup", "cutmix"):
        left = ",".join(name for name in ITEMS.split(",") if name != item)
        keys = (f"data.augment={left}", "train.epochs=2")
        done = train_photos(photos, tmp_path / item.partition(":")[0], keys=keys)
        assert done.returncode == 0, done.stderr
        found = json.loads((tmp_path / item.partition(":")[0] / "run" / "summary.json").read_text())
        assert found["weights_sha256"] != alone["weights_sha256"]
