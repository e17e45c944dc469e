"""A trained run used by several workers, each with a part of its weights: eval and predict; and export."""

import json
import signal
import sys
from types import SimpleNamespace

import forked
import pytest
import torch
from job import Job
from PIL import Image
from safetensors.torch import load_file
from small import command, small_run, train

import lockstep
from lockstep.cli.main import run
from lockstep.data.images.image_file import read_image
from lockstep.elastic.job import Job as ElasticJob
from lockstep.elastic.launcher import Launcher
from lockstep.elastic.worker_process import Worker
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


@pytest.mark.parametrize("plan", ["pipeline=2", "data=3,shard=parameters", "pipeline=2,channel=2"])
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


def test_an_evaluation_that_is_stopped_says_so(trained, tmp_path):
    words = command("eval", str(trained.directory), "--workers", "2", "--device", "cpu")
    with Job(tmp_path, command=words) as job:
        job.wait_for(lambda: len(job.workers()) == 2)
        job.process.send_signal(signal.SIGTERM)
        _, errors = job.finish(143)
    assert "stopped by SIGTERM" in errors and "--resume" not in errors and "killed" not in errors


def test_a_worker_that_a_signal_ends_is_not_lost():
    said = []
    launcher = Launcher(ElasticJob(2, 2, is_elastic=False), lambda worker, line: said.append(line))
    launcher._link.coordinator = SimpleNamespace(has_begun=True, is_over=False)
    launcher._signals.note(signal.SIGTERM)
    launcher._ended(Worker("1", 1, 0.0, code=-signal.SIGTERM))
    assert launcher._judge() == 143 and said == ["lockstep: stopped by SIGTERM"]


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

class Slope(nn.Module):
    def forward(self, x):
        with torch.enable_grad():
            inner = x.detach().requires_grad_()
            if inner.numel() and float(inner.sum()) > -1e9:  # torch.fx cannot look into it
                return x + torch.autograd.grad(inner.sin().sum(), inner)[0]

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(1, 4, 3, padding=1), nn.Linear(4, 3)
        self.one, self.two, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm2d(4)
        self.two.weight, self.slope = self.one.weight, Slope()

    def forward(self, x):
        x = self.norm(self.first(self.slope(x))).relu().mean((2, 3))
        return self.last(self.two(self.one(x).relu()))

torch.manual_seed(0)
net = Tied()
launch = lockstep.Launch(name="own", device="cpu", plan=sys.argv[1], quiet=True)
run = lockstep.Run(train=lockstep.Train(epochs=1, batch=16, lanes=4, ema=0.9))
result = lockstep.train(run, net, Images(), launch=launch)
found = lockstep.evaluate("own", net, Images(), device=launch)
again = lockstep.evaluate("own", net, Images(), device=launch)
alone = lockstep.evaluate("own", Tied(), Images(), device="cpu")
if lockstep.is_main():
    print(found == again == alone, result.summary["weights_sha256"], result.summary["ema_sha256"])
"""


def test_a_script_evaluates_its_module_in_parts(tmp_path):
    """A weight that two layers share, and a gradient inside the forward pass; the module stays as it is."""
    printed = set()
    for plan in ("data=1", "pipeline=2", "data=2,shard=parameters"):
        folder = tmp_path / plan
        folder.mkdir()
        (folder / "script.py").write_text(SCRIPT)
        done = forked.call([sys.executable, "script.py", plan], cwd=folder, launches=True)
        assert done.returncode == 0 and done.stdout.startswith("True"), done.stderr
        assert "too few" not in done.stderr
        printed.add(done.stdout)
    assert len(printed) == 1, printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--plan", "data=2", "--workers", "3"], "workers = data × pipeline = 2 × 1 = 2"),
        (["--plan", "pipeline=2", "--backend", "mpi"], "--backend mpi needs mpirun"),
        (["--plan", "shard=parameters"], "shares = data / replicas = 1 / 1"),
        (["--plan", "pipeline=2,cuts=nowhere"], "no layer 'nowhere'"),
        (["--plan", "pipeline=2", "--checkpoint", "nowhere"], "must be last, best or the path"),
    ],
)
def test_bad_input_is_said_once(words, message, trained):
    done = use("eval", trained, *words)
    assert done.returncode == 2 and message in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


def test_an_export_has_the_types_of_the_module_it_gets(tmp_path, trained):
    half = open_trained(trained.directory.parent, "run", device="cpu").model.half()
    path = lockstep.export(trained.directory, tmp_path / "half.safetensors", model=half)
    assert {tensor.dtype for tensor in load_file(path).values()} == {torch.float16, torch.int64}


def test_an_export_needs_no_model_in_memory(trained, tmp_path, monkeypatch):
    whole = open_trained(trained.directory.parent, "run", device="cpu").model.state_dict()
    monkeypatch.setattr("lockstep.runs.trained_run._copy_weights", None)  # it would be called to load them
    path = tmp_path / "model.safetensors"
    words = ["export", "run", "--runs-dir", str(trained.directory.parent), "--output", str(path)]
    assert run([*words, "--format", "safetensors"]) == 0
    found = load_file(path)
    assert found.keys() == whole.keys() and all(torch.equal(found[name], whole[name]) for name in whole)
