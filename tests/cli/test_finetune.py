"""The recipe finetune: its defaults by the images, form of images by the weights, model of a run it forks."""

import sys
import tomllib
from types import SimpleNamespace

import pytest
from photos import photo_run, take_photos
from small import summary, train

from lockstep.cli.main import run as call
from lockstep.recipes.folder_rule import choose_finetuning
from lockstep.spec.run_file import from_table


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return take_photos(tmp_path_factory.mktemp("photos"), train=12, val=2)


@pytest.fixture
def timm(monkeypatch):
    """It has a configuration of the published weights, and no network."""

    def create_model(name, **options):
        raise OSError("no network")

    config = SimpleNamespace(mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25), input_size=(3, 176, 176))
    names = {"is_model": bool, "get_pretrained_cfg": lambda name: config, "create_model": create_model}
    monkeypatch.setitem(sys.modules, "timm", SimpleNamespace(**names))


def printed(capsys, *words):
    assert call(["train", "finetune", *words, "--print-config"]) == 0
    said = capsys.readouterr()
    return from_table(tomllib.loads(said.out)), said.err


@pytest.mark.parametrize(
    ("num_train", "epochs", "batch", "lanes"),
    [(9, 30, 4, 1), (800, 30, 32, 2), (4_000, 20, 64, 2), (10_000, 12, 128, 4), (1_000_000, 5, 256, 4)],
)
def test_its_defaults(num_train, epochs, batch, lanes):
    on_cpu, on_gpu = (from_table(choose_finetuning(num_train, has_gpu)) for has_gpu in (False, True))
    train = on_cpu.train
    assert (train.epochs, train.batch, train.lanes, train.precision) == (epochs, batch, lanes, "fp32")
    assert on_cpu.optimizer.lr == pytest.approx(0.04 * batch / 256) == on_gpu.optimizer.lr
    assert (on_cpu.model.name, on_gpu.model.name, on_gpu.train.precision) == ("resnet18", "resnet50", "bf16")


@pytest.mark.usefixtures("timm")
def test_images_have_the_form_of_the_published_weights(photos, capsys):
    run, said = printed(capsys, "--device", "cpu", "-o", f"data.dir={photos}")
    assert run.model.weights == "pretrained" and run.optimizer.rates == ("head:10",)
    assert run.data.options["size"] == 176 and run.data.normalize == "0.5,0.5,0.5/0.25,0.25,0.25"
    assert "36 images of 3 classes" in said and "resnet18 at 176 pixels, 30 epochs, batch 16" in said
    own, _ = printed(capsys, "-o", f"data.dir={photos}", "-o", "data.size=64", "-o", "data.normalize=0/1")
    assert own.data.options["size"] == 64 and own.data.normalize == "0/1"


@pytest.mark.usefixtures("timm")
def test_without_a_network_one_line_says_what_to_do(photos, tmp_path, capsys):
    words = ["--runs-dir", str(tmp_path), "--device", "cpu", "-o", f"data.dir={photos}"]
    assert call(["train", "finetune", "--quiet", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "could not get the weights of resnet18 (no network)" in line and "=FILE.safetensors" in line
    assert not any(tmp_path.iterdir())


def test_a_run_of_ones_own_is_tuned_to_other_images_and_goes_on(photos, tmp_path, capsys):
    """Without timm; the run that is forked may be gone when the new one is resumed."""
    keys = ("data.normalize=0.25/0.5", "train.epochs=1", "optimizer.lr=0.01")
    first, _ = train(photo_run(photos, *keys), tmp_path)
    words = ["--runs-dir", str(tmp_path), "--device", "cpu", "-o", f"data.dir={photos}"]
    words += ["-o", "train.epochs=2", "-o", "train.batch=8", "-o", "train.lanes=2"]
    start = ["train", "finetune", "--name", "tuned", *words]
    assert call([*start, "--fork", "run", "--stop-after-epochs", "1"]) == 0
    said = capsys.readouterr()
    assert "lenet5 at 16 pixels" in said.err and "normalized by" not in said.out + said.err
    (saved,) = (first.directory / "checkpoints").glob("*.safetensors")
    saved.rename(tmp_path / "elsewhere.safetensors")
    assert call([*start, "-o", "model.name=lenet5", "-o", f"model.weights={saved}", "--resume", "auto"]) == 0
    table = tomllib.loads((tmp_path / "tuned" / "run.toml").read_text())
    assert table["model"]["name"] == "lenet5" and table["optimizer"]["rates"] == ["head:10"]
    assert table["data"]["normalize"] == "0.25,0.25,0.25/0.5,0.5,0.5" and table["data"]["size"] == 16
    assert summary(tmp_path / "tuned")["epochs"] == 2
