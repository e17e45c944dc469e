"""Several labels of an image, and numbers: from CSV files and from Python, one hash, used by every verb."""

import json

import forked
import numpy as np
import pytest
import torch
from PIL import Image
from plan_runs import hashes
from small import command, rows, summary, train

import lockstep
from lockstep.cli.main import run as lockstep_command
from lockstep.data import open_data
from lockstep.errors import DataError, ModelError
from lockstep.spec.run_file import from_table, merge, parse_overrides, to_table

NAMES = ("bright", "reddish", "left")
KINDS = {
    "binary_cross_entropy": ("evaluate.metrics=mean_ap,macro_f1", "evaluate.best=mean_ap"),
    "huber": ("evaluate.metrics=mae", "optimizer.lr=0.01"),
}


def tag(folder, count=40, numbers=False, name="labels.csv"):
    """Images, and a line for each of what is seen on it."""
    random = np.random.default_rng(0)
    lines = [",".join(("file", *NAMES))]
    (folder / "images").mkdir(parents=True, exist_ok=True)
    for number in range(count):
        bright, red, left = there = random.integers(0, 2, 3)
        pixels = random.integers(0, 60, (16, 18, 3)) + 90 * bright
        pixels[..., 0] += 60 * red
        pixels[:, :9] += 40 * left
        Image.fromarray(pixels.astype(np.uint8)).save(folder / "images" / f"{number}.png")
        values = there / 4 + 0.5 if numbers else there
        lines.append(f"images/{number}.png," + ",".join(map(str, values.tolist())))
    (folder / name).write_text("\n".join(lines) + "\n")
    return folder


def csv_run(folder, loss, *overrides):
    plain = lockstep.Run(
        data=lockstep.Data("csv", dir=str(folder), options={"size": 16, "val_fraction": 0.25}),
        train=lockstep.Train(epochs=3, batch=8, lanes=4, loss=loss),
    )
    return from_table(merge(to_table(plain), parse_overrides([*KINDS[loss], *overrides])))


@pytest.fixture(scope="module", params=list(KINDS))
def trained(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("values")
    data = tag(folder / "data", numbers=request.param == "huber")
    result, _ = train(csv_run(data, request.param), folder)
    return request.param, data, result.directory


def test_it_learns_and_says_what_it_measures(trained):
    loss, _, directory = trained
    first, *_, last = rows(directory, "epoch")
    assert last["train_loss"] < first["train_loss"] and "train_accuracy" not in last
    found = summary(directory)
    assert "accuracy" not in found and found["best_by"] == ("mean_ap" if loss.startswith("b") else "loss")
    assert found["best_value"] == (max if loss.startswith("b") else min)(
        row[f"val_{found['best_by']}"] for row in rows(directory, "epoch")
    )


@pytest.mark.gloo
@pytest.mark.parametrize("workers", [2, 3])
def test_one_hash(workers, trained, tmp_path):
    directory = trained[-1]
    words = ["train", "-c", str(directory / "run.toml"), "--runs-dir", str(tmp_path), "--name", "run"]
    words += ["--device", "cpu", "--workers", str(workers)]
    done = forked.call(command(*words), launches=True)
    assert done.returncode == 0, done.stderr
    assert hashes(tmp_path / "run") == hashes(directory)
    assert summary(tmp_path / "run")["metrics"] == summary(directory)["metrics"]


@pytest.mark.gloo
def test_a_pipeline_has_the_same_hash(trained, tmp_path):
    directory = trained[-1]
    words = ["train", "-c", str(directory / "run.toml"), "--runs-dir", str(tmp_path), "--name", "run"]
    done = forked.call(
        command(*words, "--device", "cpu", "--workers", "2", "--plan", "pipeline=2"), launches=True
    )
    assert done.returncode == 0, done.stderr
    assert hashes(tmp_path / "run") == hashes(directory)


def test_every_verb_uses_it(trained, capsys, tmp_path):
    loss, data, directory = trained
    flags = [str(directory), "--device", "cpu", "--json"]
    assert lockstep_command(["eval", *flags]) == 0
    row, found = json.loads(capsys.readouterr().out), summary(directory)
    assert (row["loss"], row["metrics"], row["accuracy"]) == (found["loss"], found["metrics"], None)
    image = data / "images" / "3.png"
    assert lockstep_command(["predict", *flags, str(image)]) == 0
    told = json.loads(capsys.readouterr().out)
    values = told["probabilities" if loss.startswith("b") else "values"]
    predict = lockstep.predictor(directory, device="cpu")
    pixels = torch.from_numpy(np.array(Image.open(image).resize((18, 16)))).permute(2, 0, 1)[None, :, :, 1:17]
    rough = dict(zip(predict.classes, predict(pixels.contiguous())[0].tolist(), strict=True))
    assert values.keys() == set(NAMES) and values == pytest.approx(rough, abs=0.02)
    assert lockstep_command(["predict", *flags[:-1], str(image)]) == 0
    assert all(name in capsys.readouterr().out for name in NAMES[:1])
    assert lockstep_command(["eval", *flags, "--by-class"]) in (1, 2)
    assert "no classes to count" in capsys.readouterr().err
    assert lockstep_command(["eval", *flags, "--other-data", str(data)]) == 2
    assert "this run has rows of values" in capsys.readouterr().err
    lockstep.export(directory, tmp_path / "model.safetensors")
    assert lockstep_command(["data", "info", "csv", "--dir", str(data)]) == 0
    assert "3 values\n  bright, reddish, left" in capsys.readouterr().out
    assert lockstep_command(["data", "check", "csv", "--dir", str(data)]) == 0
    sheet = [
        "-o",
        "data.name=csv",
        "-o",
        f"data.dir={data}",
        "-o",
        "train.batch=8",
        "-o",
        f"train.loss={loss}",
    ]
    assert (
        lockstep_command(["data", "show", *sheet, "--images", "4", "--output", str(tmp_path / "a.png")]) == 0
    )


class Rows:
    """Images and rows of labels, or one number."""

    def __init__(self, target, length=24):
        self.target, self.length = target, length

    def __len__(self):
        return self.length

    def __getitem__(self, number):
        if number >= self.length:
            raise IndexError
        image = torch.zeros(1, 16, 16, dtype=torch.uint8)
        image[0, number % 16] = 255
        return image, self.target(number)


@pytest.mark.parametrize(
    ("loss", "target", "outputs"),
    [
        ("binary_cross_entropy", lambda n: torch.tensor([n % 2, n % 16 > 8]), 2),
        ("l1", lambda n: n % 16, 1),  # an integer is a number here
        ("mse", lambda n: n % 16 / 16, 1),
    ],
)
def test_a_data_set_in_python_needs_no_loss(loss, target, outputs, tmp_path):
    run = lockstep.Run(train=lockstep.Train(loss=loss, epochs=1, batch=8, lanes=2))
    result, _ = train(run, tmp_path, data=(Rows(target), Rows(target, 10)))
    predict = lockstep.predictor(result.directory, device="cpu")
    assert predict(torch.zeros(3, 1, 16, 16, dtype=torch.uint8)).shape == (3, outputs)
    found = lockstep.evaluate(result.directory, data=Rows(target, 10), device="cpu")
    assert found.accuracy is None and found.samples < 10


def test_held_out_and_named_splits(tmp_path):
    store = open_data(csv_run(tag(tmp_path / "a"), "huber"))
    assert store.classes == NAMES and store.test_name == "val"
    assert len(store.train) + len(store.test) == 40 and 4 <= len(store.test) <= 16
    folder = tag(tmp_path / "b", name="train.csv")
    tag(folder, 6, name="val.csv")
    tag(folder, 5, name="test.csv")
    store = open_data(csv_run(folder, "huber"))
    assert (len(store.train), len(store.val), len(store.test)) == (40, 6, 5)
    before = dict(store.manifest)
    text = (folder / "train.csv").read_text()
    (folder / "train.csv").write_text(
        text.replace("images/1.png,0", "images/1.png,2").replace("images/1.png,1", "images/1.png,0")
    )
    assert open_data(csv_run(folder, "huber")).manifest != before


def test_bad_files_and_runs_are_one_line(tmp_path):
    folder = tag(tmp_path / "data")
    good = (folder / "labels.csv").read_text()
    cases = {
        "file,a,a\nimages/1.png,1,1": "must name the file and each value once",
        "file,a\n/images/1.png,1": "must be a path below",
        "file,a\nimages/none.png,1": "No such file",
        "file,a\nimages/1.png,1,2": "has 2 values, and the first line names 1",
        "file,a\nimages/1.png,yes": "line 2: a='yes' must be a number",
        "file,a\nimages/1.png,1\nimages/1.png,0": "line 3: images/1.png is there already",
        "file,a\n": "names no image",
    }
    for text, message in cases.items():
        (folder / "labels.csv").write_text(text)
        with pytest.raises(DataError, match=message):
            open_data(csv_run(folder, "huber"))
    (folder / "labels.csv").write_text(good.replace(",1\n", ",3\n"))
    refused = {
        ("binary_cross_entropy",): (ModelError, "has 3 as 'left': labels are 0 or 1"),
        ("huber", "data.order=balanced"): (DataError, "csv has no classes to balance"),
        ("huber", "data.augment=mixup"): (DataError, "mixes labels, and the targets of csv are none"),
    }
    for (loss, *keys), (kind, message) in refused.items():
        with pytest.raises(kind, match=message):
            train(csv_run(folder, loss, *keys), tmp_path / "runs")
    plain = from_table(
        merge(to_table(csv_run(folder, "huber", "evaluate.metrics=[]")), {"train": {"loss": "cross_entropy"}})
    )
    with pytest.raises(
        ModelError, match="csv has a row of values for each image: use binary_cross_entropy or mse"
    ):
        train(plain, tmp_path / "runs")
    assert not (tmp_path / "runs").exists()
