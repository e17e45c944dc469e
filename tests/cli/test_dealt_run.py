"""A trained run used by several workers, each with a part of its weights: eval and predict; and export."""

import json
import sys

import forked
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from small import command, small_run, train

from lockstep.cli.main import run
from lockstep.data.image_file import read_image
from lockstep.runs.trained_run import open_trained

pytestmark = pytest.mark.gloo
KEYS = ("model.name=resnet18", "train.batch=16", "data.num_train=32", "data.num_test=21", "train.ema=0.9")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    keys = (*KEYS, "train.epochs=1", "train.lanes=4", "train.channels_last=true")
    return train(small_run(*keys), tmp_path_factory.mktemp("runs"), launch={"name": "run"})[0]


def use(verb, trained, *more):
    where = ["--runs-dir", str(trained.directory.parent), "--json", "--device", "cpu"]
    return forked.call(command(verb, "run", *more, *where), launches=True)


@pytest.mark.parametrize("plan", ["pipeline=2", "data=3,shard=parameters"])
def test_evaluation_gives_the_bits_of_one_worker(plan, trained):
    done = use("eval", trained, "--plan", plan)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [found[key] for key in ("loss", "accuracy")] == [
        trained.summary[key] for key in ("loss", "accuracy")
    ]


def test_workers_with_the_whole_model_share_the_images(trained):
    done = use("eval", trained, "--workers", "2")
    assert json.loads(done.stdout)["loss"] == trained.summary["loss"], done.stderr


def test_prediction_gives_what_the_model_gives(trained, tmp_path):
    picture = tmp_path / "picture.png"
    Image.fromarray((torch.arange(256) % 251).view(16, 16).byte().numpy()).save(picture)
    done = use("predict", trained, str(picture), "--plan", "data=2,pipeline=2,shard=parameters")
    assert done.returncode == 0, done.stderr
    whole = open_trained(trained.directory.parent, "run", device="cpu")
    image, _ = read_image(picture, whole.shape)
    normal = whole.augment.normalize(image[None]).contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        wanted = whole.model(normal).softmax(1)[0].topk(5).values.tolist()
    assert [row["probability"] for row in json.loads(done.stdout)["top"]] == wanted


SCRIPT = """
import sys, torch, lockstep
from torch import nn

class Images:
    def __len__(self):
        return 48

    def __getitem__(self, i):
        return torch.rand(1, 8, 8, generator=torch.Generator().manual_seed(i)), i % 3

torch.manual_seed(0)
net = lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
launch = lockstep.Launch(name="own", device="cpu", plan="pipeline=2", quiet=True)
run = lockstep.Run(train=lockstep.Train(epochs=1, batch=16, lanes=4))
result = lockstep.train(run, net(), Images(), launch=launch)
found = lockstep.evaluate("own", net(), Images(), device=launch)
alone = lockstep.evaluate("own", net(), Images(), device="cpu")
if lockstep.is_main():
    print(found == alone, found.samples)
"""


def test_a_script_evaluates_its_module_by_stages(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    done = forked.call([sys.executable, "script.py"], cwd=tmp_path, launches=True)
    assert done.returncode == 0 and done.stdout.split() == ["True", "4"], done.stderr
    assert "too few" not in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--plan", "pipeline=2,data=2", "--workers", "3"], "workers = data × pipeline = 2 × 2 = 4"),
        (["--plan", "shard=parameters"], "shares = data / replicas = 1 / 1"),
        (["--plan", "pipeline=2,cuts=nowhere"], "no layer 'nowhere'"),
        (["--plan", "pipeline=2", "--checkpoint", "nowhere"], "must be last, best or the path"),
    ],
)
def test_bad_input_is_said_once(words, message, trained):
    done = use("eval", trained, *words)
    assert done.returncode == 2 and message in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


def test_an_export_needs_no_model_in_memory(trained, tmp_path, monkeypatch):
    whole = open_trained(trained.directory.parent, "run", device="cpu").model.state_dict()
    monkeypatch.setattr("lockstep.runs.trained_run._copy_weights", None)  # it would be called to load them
    path = tmp_path / "model.safetensors"
    words = ["export", "run", "--runs-dir", str(trained.directory.parent), "--output", str(path)]
    assert run([*words, "--format", "safetensors"]) == 0
    found = load_file(path)
    assert found.keys() == whole.keys() and all(torch.equal(found[name], whole[name]) for name in whole)
