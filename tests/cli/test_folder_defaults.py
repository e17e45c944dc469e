"""The defaults of the recipe folder: chosen by its training images, told, overridden, kept when resumed."""

import tomllib
from dataclasses import replace

import numpy as np
import pytest
from photos import take_photos
from PIL import Image

import lockstep
from lockstep.cli.main import run as call
from lockstep.recipes.folder_rule import choose_defaults
from lockstep.spec.run_file import from_table, merge, parse_overrides, to_table

QUICK = ("model.name=lenet5", "data.size=16", "train.epochs=1", "data.augment=flip", "train.precision=fp32")


@pytest.fixture
def photos(tmp_path):
    return take_photos(tmp_path / "photos", train=12, test=2)


def words(photos, *keys):
    return ["train", "folder", *(word for key in (f"data.dir={photos}", *keys) for word in ("-o", key))]


def printed(capsys, photos, *keys):
    """The Run that --print-config prints, and what is told beside it."""
    assert call([*words(photos, *keys), "--print-config"]) == 0
    said = capsys.readouterr()
    return from_table(tomllib.loads(said.out)), said.err


def test_small_colour_images_are_trained_as_those_of_cifar10():
    run = from_table(choose_defaults(50_000, 10, 32, 3, has_gpu=True))
    known = lockstep.recipe("cifar10")
    assert run.model == known.model and run.optimizer == known.optimizer and run.schedule == known.schedule
    assert to_table(run)["train"] == to_table(known)["train"] | {"epochs": 24}
    assert run.data.augment == ("flip", "crop", "cutout")  # of 32 pixels: crop:4, cutout:8
    assert run.data.options == {"size": 32, "channels": 3}


@pytest.mark.parametrize(
    ("facts", "model", "size", "epochs", "batch", "lanes", "precision"),
    [
        ((60_000, 10, 28, 1), "resnet18", 28, 24, 256, 4, "bf16"),
        ((3_800, 10, 375, 3), "resnet18", 160, 120, 64, 2, "bf16"),
        ((200, 4, 400, 3), "resnet18", 160, 200, 32, 2, "fp32"),
        ((1_281_167, 1000, 375, 3), "resnet50", 224, 18, 256, 4, "bf16"),
        ((9, 3, 100, 3), "resnet18", 96, 200, 4, 1, "fp32"),
        ((2, 2, 12, 3), "resnet18", 12, 200, 2, 1, "fp32"),
    ],
)
def test_other_images(facts, model, size, epochs, batch, lanes, precision):
    run = from_table(choose_defaults(*facts, has_gpu=True))
    on_cpu = from_table(choose_defaults(*facts, has_gpu=False))
    assert on_cpu == replace(run, train=replace(run.train, precision="fp32"))
    assert run.model.name == model and run.data.options == {"size": size, "channels": facts[3]}
    train = run.train
    assert (train.epochs, train.batch, train.lanes, train.precision) == (epochs, batch, lanes, precision)
    assert train.batch <= facts[0]
    assert ("random_resized_crop" in run.data.augment[0]) == (facts[2] >= 96)
    assert ("trivial_augment" in run.data.augment) == (facts[2] >= 96 and facts[0] / facts[1] < 1000)


def test_they_are_told_and_printed_and_a_key_of_the_users_wins(capsys, photos):
    run, said = printed(capsys, photos, "train.epochs=7", "optimizer.name=adamw")
    assert said.startswith(
        "36 images of 3 classes, about 20 pixels: resnet18 at 20 pixels, 7 epochs, batch 16"
    )
    assert "-o KEY=VALUE" in said and said.count("\n") == 2
    assert run.train.epochs == 7 and run.optimizer.name == "adamw" and run.train.lanes == 1


def test_test_images_have_no_say(capsys, photos):
    before, _ = printed(capsys, photos)
    for path in (photos / "test").rglob("*.jpg"):
        Image.fromarray(np.zeros((300, 300), np.uint8)).save(path)
    assert printed(capsys, photos)[0] == before


def test_grey_images_have_one_channel(capsys, photos):
    for path in (photos / "train").rglob("*.jpg"):
        Image.open(path).convert("L").save(path)
    run, said = printed(capsys, photos)
    assert run.data.options["channels"] == 1 and said.startswith("36 grey images")


def test_without_a_folder_the_recipe_is_as_it_was(capsys, tmp_path):
    run, said = printed(capsys, tmp_path / "nowhere")
    assert to_table(run) == merge(
        to_table(lockstep.recipe("folder")), parse_overrides([f"data.dir={tmp_path / 'nowhere'}"])
    )
    assert said == ""


def test_a_pack_has_the_defaults_of_its_folder(capsys, photos, tmp_path):
    assert call(["data", "pack", str(photos), str(tmp_path / "packed")]) == 0
    capsys.readouterr()
    folder, _ = printed(capsys, photos)
    pack, said = printed(capsys, tmp_path / "packed", "data.name=pack")
    assert "36 images" in said
    assert to_table(pack) == merge(to_table(folder), {"data": to_table(pack)["data"]})
    assert pack.data.options == folder.data.options and pack.data.augment == folder.data.augment


def test_a_resumed_run_keeps_the_defaults_it_began_with(capsys, photos, tmp_path):
    more = ["--runs-dir", str(tmp_path / "runs"), "--device", "cpu", "--quiet"]
    assert call([*words(photos, *QUICK), *more]) == 0
    take_photos(photos, train=60)
    capsys.readouterr()
    resumed = [*words(photos, *QUICK), *more[:-1], "--resume", "auto"]
    assert call([*resumed, "--print-config"]) == 0
    assert "batch = 16\nlanes = 1\n" in capsys.readouterr().out
    assert printed(capsys, photos)[0].train.batch == 32
    assert call(resumed) == 2
    assert "other images" in (said := capsys.readouterr().err) or "manifest.num_train" in said


def test_imagenet_says_how_its_folders_must_look(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for keys in ([], ["-o", "data.dir=nowhere"]):
        assert call(["train", "imagenet", *keys]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and "train/n01440764/*.JPEG" in said and "lockstep data pack" in said


def test_a_pack_of_imagenet_is_read_at_the_recipes_size(capsys):
    assert call(["train", "imagenet", "-o", "data.name=pack", "-o", "data.dir=packed", "--print-config"]) == 0
    run = from_table(tomllib.loads(capsys.readouterr().out))
    assert run.data.name == "pack" and run.data.options == {"size": 224}


def test_imagenet_trains_on_folders_of_its_form(photos, tmp_path):
    """As a user does, with few and small images of three classes."""
    keys = ("model.name=lenet5", "data.size=16", "train.epochs=2", "train.batch=16", "train.precision=fp32")
    words = [word for key in (f"data.dir={photos}", *keys) for word in ("-o", key)]
    more = ["--runs-dir", str(tmp_path / "runs"), "--device", "cpu", "--quiet"]
    assert call(["train", "imagenet", *words, *more]) == 0


@pytest.mark.parametrize(
    "key", ["data.eval_crop=3", "data.eval_size=-1", "data.sizes=32@1", "data.crop_pct=87.5"]
)
def test_wrong_keys_are_refused_though_nothing_is_trained(photos, capsys, key):
    assert call([*words(photos, key), "--print-config"]) == 2
    assert key.partition("=")[0] in capsys.readouterr().err


def test_the_defaults_do_not_depend_on_a_decoder_that_is_elsewhere(photos, capsys):
    run, _ = printed(capsys, photos)
    other, _ = printed(capsys, photos, "data.decoder=nvjpeg")
    assert other.train == run.train and other.data.augment == run.data.augment
