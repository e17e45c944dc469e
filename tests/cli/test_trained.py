"""eval, predict, export, data and doctor on a really trained run."""

import json
import os
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file
from small import call, command, small_run, train
from torch import nn

import lockstep
from lockstep.cli.main import run
from lockstep.errors import LockstepError
from lockstep.runs.event import CheckpointSaved


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    result, _ = train(small_run("train.channels_last=true"), folder, launch={"name": "mine"})
    return result


def arguments(verb, trained, *more):
    return [verb, "mine", *more, "--runs-dir", str(trained.directory.parent)]


def picture(path, size=(16, 16), mode="L"):
    pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).convert(mode).save(path)
    return str(path)


def test_eval_repeats_the_accuracy_of_training(trained, capsys):
    assert run(arguments("eval", trained, "--json", "--device", "cpu")) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["accuracy"] == trained.summary["accuracy"] and found["loss"] == trained.summary["loss"]
    assert run(arguments("eval", trained, "--checkpoint", "best", "--device", "cpu")) == 0
    assert "accuracy" in capsys.readouterr().out


def test_predict_gives_five_classes_and_says_when_it_resizes(trained, tmp_path, capsys):
    small, large = picture(tmp_path / "a.png"), picture(tmp_path / "b.jpg", (40, 20), "RGB")
    assert run(arguments("predict", trained, small, large, "--json", "--device", "cpu")) == 0
    captured = capsys.readouterr()
    rows = [json.loads(line) for line in captured.out.splitlines()]
    assert [row["image"] for row in rows] == [small, large]
    for row in rows:
        shares = [item["probability"] for item in row["top"]]
        assert len(shares) == 5 and shares == sorted(shares, reverse=True) and sum(shares) <= 1.0001
    assert captured.err == f"{large}: resized from 40×20 to 16×16\n"


@pytest.mark.parametrize("content", [None, b"no image"])
def test_predict_names_all_images_it_cannot_read(trained, tmp_path, capsys, content):
    paths = [tmp_path / "bad.png", tmp_path / "worse.png"]
    for path in paths if content else ():
        path.write_bytes(content)
    assert run(arguments("predict", trained, *map(str, paths), "--device", "cpu")) == 2
    captured = capsys.readouterr()
    assert "bad.png" in captured.err and "worse.png" in captured.err and not captured.out


def test_export_safetensors_is_the_model(trained, capsys):
    assert run(arguments("export", trained, "--format", "safetensors")) == 0
    tensors = load_file(trained.directory / "model.safetensors")
    expected = lockstep.load(trained.directory).state_dict()
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in tensors)
    assert run(arguments("export", trained, "--format", "safetensors")) == 2
    assert "not overwritten" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore")
def test_export_onnx_agrees_with_onnxruntime(trained, tmp_path, capsys):
    onnxruntime = pytest.importorskip("onnxruntime")
    path = tmp_path / "model.onnx"
    assert run(arguments("export", trained, "--format", "onnx", "--output", str(path))) == 0
    session = onnxruntime.InferenceSession(path.read_bytes())
    images = torch.randn(5, 1, 16, 16)
    (found,) = session.run(None, {"images": images.numpy()})
    with torch.no_grad():
        expected = lockstep.load(trained.directory)(images)
    torch.testing.assert_close(torch.from_numpy(found), expected, rtol=1e-4, atol=1e-4)


def small_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 3))


def double(logits, labels):
    return 2 * nn.functional.cross_entropy(logits, labels)


def pictures(count, seed, dtype=torch.uint8):
    images = torch.randint(0, 256, (count, 1, 8, 8), generator=torch.Generator().manual_seed(seed))
    return torch.utils.data.TensorDataset(images.to(dtype), torch.arange(count) % 3)


def test_a_scripts_run_is_evaluated_and_exported_in_python(tmp_path):
    data = pictures(64, 0), pictures(20, 1)
    given = {"model": small_net(), "data": data, "loss": double}
    result, _ = train(small_run("train.batch=16"), tmp_path, **given)
    found = lockstep.evaluate(result.directory, model=small_net(), data=data, loss=double, device="cpu")
    assert (found.accuracy, found.loss) == (result.summary["accuracy"], result.summary["loss"])
    best = lockstep.evaluate(result.directory, small_net(), data, checkpoint="best", device="cpu")
    assert best.accuracy == result.summary["best_accuracy"]
    other = lockstep.evaluate(result.directory, small_net(), (data[0], pictures(9, 2)), device="cpu")
    assert other.samples == 9
    path = lockstep.export(result.directory, tmp_path / "model.safetensors", small_net())
    assert torch.equal(load_file(path)["1.weight"], given["model"][1].weight)
    with safe_open(path, "pt") as file:
        assert json.loads(file.metadata()["lockstep"])["model"].endswith("Sequential")


def test_a_run_by_name_is_evaluated_in_python(trained):
    assert lockstep.evaluate(trained.directory, device="cpu").accuracy == trained.summary["accuracy"]


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (
            lambda run: lockstep.evaluate(run, data=pictures(30, 0)),
            r"images \(1, 8, 8\) \(C, H, W\) and 3 classes",
        ),
        (
            lambda run: lockstep.evaluate(run, data=[(torch.zeros(1, 16, 16), i % 10) for i in range(20)]),
            "are floats, and the run was trained on uint8",
        ),
        (lambda run: lockstep.export(run, run / "model.txt"), "unknown format 'txt': choose from onnx, safe"),
        (lambda run: lockstep.export(run, run / "run.safetensors" / "x.onnx"), "does not exist"),
    ],
)
def test_what_does_not_fit_a_run_is_refused(work, message, trained):
    with pytest.raises(LockstepError, match=message):
        work(trained.directory)


def test_weights_of_an_export_start_a_new_run(trained, tmp_path):
    if not (trained.directory / "model.safetensors").exists():
        assert run(arguments("export", trained, "--format", "safetensors")) == 0
    weights = trained.directory / "model.safetensors"
    result, _ = train(small_run("train.epochs=1", f"model.weights={weights}"), tmp_path)
    assert result.summary["accuracy"] >= 0


@pytest.mark.parametrize(("step", "code", "said"), [(0, 2, "no trained weights"), (2, 0, "is not finished")])
def test_a_run_that_was_stopped_says_so(step, code, said, tmp_path, capsys):
    def stop(event):
        if isinstance(event, CheckpointSaved) and event.step == step:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        train(small_run("train.epochs=1", "checkpoint.every_steps=1"), tmp_path, on_event=stop)
    assert run(["eval", str(tmp_path / "run"), "--device", "cpu"]) == code
    assert said in capsys.readouterr().err


def test_a_run_that_does_not_exist_is_named(tmp_path, capsys):
    for verb, more in (("eval", []), ("predict", ["x.png"]), ("export", ["--format", "onnx"])):
        assert run([verb, "nothing", *more, "--runs-dir", str(tmp_path)]) == 2
        assert "no run 'nothing'" in capsys.readouterr().err


def test_data_info(capsys):
    assert run(["data", "info", "shapes", "-o", "data.classes=3", "-o", "data.num_train=20", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["train"] == 20 and len(facts["classes"]) == 3
    overrides = ["data.num_train=20", "data.num_test=5", "data.augment=flip"]
    assert run(["data", "info", "shapes", *(word for item in overrides for word in ("-o", item))]) == 0
    assert "20 training and 5 test images" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("num_train=20", "data info takes keys of data only, like -o data.size=64"),
        ("train.batch=2", "data info takes keys of data only"),
        ("data=2", "data=2 must be a table"),
        ("data.name=mnist", "-o data.name: fashion is given as NAME"),
        ("data.dir=5", "data.dir=5 must be text"),
        ("data.augment=nonsense", "nonsense"),
        ("data.dir=/nowhere", "data.dir=/nowhere: no such folder"),
    ],
)
def test_data_info_takes_the_keys_of_a_training(override, said, capsys):
    assert run(["data", "info", "fashion", "-o", override]) == 2
    assert said in capsys.readouterr().err


def test_a_terminal_without_the_signs_is_told_all_the_same():
    done = call(command("data", "info", "shapes"), env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0 and "1 ? 28 ? 28 (channels, height, width)" in done.stdout, done.stderr


def test_data_get_names_what_can_be_fetched(tmp_path, capsys):
    assert run(["data", "get", "imagenet", "--dir", str(tmp_path)]) == 2
    assert "cifar10" in capsys.readouterr().err
    assert run(["data", "get", "mnist", "--dir", str(tmp_path), "--mirror", "http://127.0.0.1:9/"]) == 1
    assert "http://127.0.0.1:9/" in capsys.readouterr().err


def test_doctor_shows_the_fingerprint(capsys, tmp_path):
    assert run(["doctor", "--json", "--data-dir", str(tmp_path)]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["versions"]["torch"].startswith("2.")
    (fingerprint,) = [rows for name, rows in facts.items() if name.startswith("fingerprint")]
    assert len(fingerprint["probe"]) == 16
    assert run(["doctor"]) == 0 and "fingerprint" in capsys.readouterr().out
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert facts["extras"].keys() == project["optional-dependencies"].keys() - {"dev", "docs"}
