"""Validation images choose, test images have the last word; and each is called by its name."""

import json

import pytest
from photos import photo_run, take_photos
from small import rows, train

import lockstep
from lockstep.cli.main import run
from lockstep.runs.event import EpochDone, Notice, Started


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on train/, validation/ and test/, and what it told."""
    folder = tmp_path_factory.mktemp("three")
    photos = take_photos(folder / "photos", train=8, validation=3, test=2)
    (photos / "train" / "red" / "left.webp").write_bytes(b"")
    return *train(photo_run(photos, "train.ema=0.5"), folder, by=lockstep.train), photos


def evaluate(trained, capsys, *flags):
    """What `lockstep eval` says of it."""
    words = ["eval", str(trained[0].directory), "--device", "cpu", "--json", *flags]
    assert run(words) == 0
    return json.loads(capsys.readouterr().out)


def test_epochs_are_evaluated_on_val_and_the_end_on_test(trained, capsys):
    result, events, _ = trained
    told = [event for event in events if isinstance(event, EpochDone)]
    assert [event.split for event in told] == ["val", "val"]
    last = rows(result.directory, "epoch")[-1]
    summary = result.summary
    assert (last["val_accuracy"], last["val_loss"]) == (summary["accuracy"], summary["loss"])
    assert "test_loss" not in last and summary["split"] == "val"
    assert summary["best_accuracy"] == max(event.eval_accuracy for event in told)
    by_split = {name: evaluate(trained, capsys, "--split", name) for name in ("val", "test")}
    assert {name: row["samples"] for name, row in by_split.items()} == {"val": 9, "test": 6}
    assert by_split["val"]["loss"] == summary["loss"]
    assert by_split["test"]["loss"] == summary["test_loss"]
    assert by_split["test"]["accuracy"] == summary["test_accuracy"]
    assert evaluate(trained, capsys) == by_split["test"]


def test_the_folders_that_are_used_are_said_at_the_start(trained):
    _, events, photos = trained
    first = [event for event in events if isinstance(event, Notice | Started)]
    assert [type(event) for event in first] == [Notice, Notice, Started]
    assert f"{photos / 'validation'} (9) to evaluate on after every epoch" in first[0].text
    assert first[1].warning and "1 .webp" in first[1].text
    assert (first[2].num_train, first[2].num_val, first[2].num_test) == (24, 9, 6)


def test_the_test_images_change_no_weight(trained, tmp_path):
    result, _, _ = trained
    photos = take_photos(tmp_path / "photos", train=8, val=3)
    other, _ = train(photo_run(photos, "train.ema=0.5"), tmp_path)
    for key in ("weights_sha256", "ema_sha256", "accuracy", "loss", "best_accuracy"):
        assert other.summary[key] == result.summary[key], key
    assert "test_accuracy" not in other.summary and other.summary["split"] == "val"


def test_other_images_are_evaluated_only_when_asked_for(trained, tmp_path, capsys):
    other = take_photos(tmp_path / "other", train=4, test=3)
    words = ["eval", str(trained[0].directory), "--device", "cpu"]
    assert run([*words, "--data-dir", str(other)]) == 2
    assert "was trained on other data" in (said := capsys.readouterr().err) and "--other-data DIR" in said
    row = evaluate(trained, capsys, "--other-data", str(other))
    assert row["other_data"] and row["samples"] == 9 and row["split"] == str(other / "test")
    assert evaluate(trained, capsys, "--other-data", str(other / "train"))["samples"] == 12
    assert run([*words, "--other-data", str(other / "test")]) == 0
    assert f"accuracy on other data, {other / 'test'}:" in capsys.readouterr().out


def test_a_split_that_is_not_there_is_named(tmp_path, capsys):
    photos = take_photos(tmp_path / "photos", train=8, test=2)
    result, _ = train(photo_run(photos, "train.epochs=1"), tmp_path)
    assert result.summary["split"] == "test" and "test_accuracy" not in result.summary
    assert run(["eval", str(result.directory), "--device", "cpu", "--split", "val"]) == 2
    assert "--split val: folder has no such images here: use --split test" in capsys.readouterr().err
