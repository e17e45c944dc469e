"""eval, predict, export, data and doctor on a really trained run."""

import json
import os
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from small import call, command, small_run, train

import lockstep
from lockstep.cli.main import run


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
def test_predict_names_an_image_it_cannot_read(trained, tmp_path, capsys, content):
    path = tmp_path / "bad.png"
    if content:
        path.write_bytes(content)
    assert run(arguments("predict", trained, str(path), "--device", "cpu")) == 2
    captured = capsys.readouterr()
    assert "bad.png" in captured.err and not captured.out


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


def test_weights_of_an_export_start_a_new_run(trained, tmp_path):
    if not (trained.directory / "model.safetensors").exists():
        assert run(arguments("export", trained, "--format", "safetensors")) == 0
    weights = trained.directory / "model.safetensors"
    result, _ = train(small_run("train.epochs=1", f"model.weights={weights}"), tmp_path)
    assert result.summary["accuracy"] >= 0


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
    assert facts["extras"].keys() == project["optional-dependencies"].keys() - {"dev"}
