"""The promise under plans: the weights of one worker, whatever the stages, the schedule and the lanes."""

import os
import signal
import sys

import forked
import pytest
from job import Job, assert_no_step_lost
from plan_runs import HASHES, hashes, run
from small import train_command

EVERYTHING = ("train.lanes=8", "train.epochs=1", "data.augment=flip,crop", "train.ema=0.9", "train.clip=1.0")
PLAIN = ("train.lanes=8", "train.epochs=1", "train.clip=1.0", "optimizer.name=sgd")
SMALL = ("train.batch=16", "data.num_train=40", "data.num_test=21")
MODELS = {
    "lenet5": EVERYTHING,
    "resnet18": (*EVERYTHING, *SMALL, "model.name=resnet18", "train.channels_last=true"),
    "googlenet": (*EVERYTHING, *SMALL, "model.name=googlenet"),
    # the largest, without what makes their state larger still
    "alexnet": (*PLAIN, *SMALL, "model.name=alexnet", "data.size=64"),
    "vgg11": (*PLAIN, *SMALL, "model.name=vgg11", "data.size=32"),
}
COVERING = [
    ("lenet5", "pipeline=2"),
    ("lenet5", "data=2,pipeline=2,schedule=gpipe"),
    ("lenet5", "data=3,pipeline=2,shard=parameters"),
    ("lenet5", "data=3,shard=optimizer"),
    ("lenet5", "data=5,shard=gradients,replicas=2"),
    ("lenet5", "data=3,channel=2"),
    ("lenet5", "data=2,channel=2,shard=parameters"),
    ("resnet18", "pipeline=3,cost=counted"),
    ("resnet18", "data=4,shard=parameters"),
    ("googlenet", "pipeline=4,schedule=gpipe,cost=counted"),
    ("alexnet", "pipeline=2,cost=counted"),
    ("vgg11", "data=2,pipeline=2,shard=gradients,cost=counted"),
]


@pytest.fixture
def reference(by_one_worker):
    """The hashes of a run by one worker."""

    def find(model):
        found = by_one_worker(*MODELS[model])
        return {key: found.get(key) for key in HASHES}

    return find


@pytest.mark.gloo
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("model", "plan"), COVERING)
def test_a_plan_gives_the_bits_of_one_worker(model, plan, reference, tmp_path):
    draws = plan.startswith("pipeline")
    run(tmp_path, "--plan", plan, overrides=MODELS[model], draws=draws)
    assert draws == (tmp_path / "run" / "pipeline.png").exists()
    assert hashes(tmp_path / "run") == reference(model)


@pytest.mark.gloo
def test_a_run_goes_on_under_another_plan(reference, tmp_path):
    overrides = (*MODELS["lenet5"], "checkpoint.keep=99")
    run(tmp_path, "--workers", "4", overrides=overrides)
    saved = tmp_path / "run" / "checkpoints"
    plans = (3, ["--plan", "pipeline=2"]), (6, ["--plan", "data=3,shard=parameters"]), (9, [])
    for step, plan in plans:
        later = [path for path in saved.glob("step-*") if int(path.stem[5:]) > step]
        for path in (*later, tmp_path / "run" / "summary.json"):
            path.unlink()
        run(tmp_path, *plan, "--resume", str(tmp_path / "run"), overrides=overrides)
        assert hashes(tmp_path / "run") == reference("lenet5") | {
            "identity": hashes(tmp_path / "run")["identity"]
        }


@pytest.mark.gloo
@pytest.mark.parametrize("victim", ["0", "1"])
def test_a_lost_stage_costs_no_bit(victim, reference, tmp_path):
    with Job(tmp_path, "--plan", "pipeline=2", overrides=MODELS["lenet5"], paced=True) as job:
        job.wait_for_steps(4)
        os.kill(job.workers()[victim], signal.SIGKILL)
        job.wait_for(lambda: victim not in job.workers(), "the loss")
        job.hurry()
        job.process.communicate()
        assert job.process.returncode == 0, job.errors()
    assert_no_step_lost(tmp_path / "run")
    assert hashes(tmp_path / "run") == reference("lenet5")


OWN = """
import os, signal, torch, lockstep
from pathlib import Path
from torch import nn

class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Linear(4, 1)

    def forward(self, x):
        h = torch.relu(self.norm(self.first(x)))
        number = self.last(nn.functional.dropout(h, 0.2, self.training).mean((2, 3)))
        return {"mask": h[:, :1], "number": number}

class Images:
    def __len__(self):
        return 96

    def __getitem__(self, i):
        x = torch.rand(1, 8, 8, generator=torch.Generator().manual_seed(i))
        return x, {"mask": x * 2, "number": x.mean()}

def loss(outputs, targets):
    Path("calls").open("a").write(".")
    if Path("calls").stat().st_size == 60 and not Path("killed").exists():
        Path("killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    differ = outputs["mask"] - targets["mask"], outputs["number"][:, 0] - targets["number"]
    return sum(part.square().mean() for part in differ)

torch.manual_seed(0)
train = lockstep.Train(epochs=4, batch=16, lanes=4, clip=1.0, ema=0.9)
run = lockstep.Run(train=train, checkpoint=lockstep.spec.Checkpoint(every_steps=2))
launch = lockstep.Launch(name="run", runs_dir=Path(), device="cpu", plan=os.environ["PLAN"], quiet=True)
result = lockstep.train(run, Own(), Images(), loss, launch=launch)
if lockstep.is_main():
    print(result.summary["weights_sha256"], sum(p.isfinite().all().item() for p in result.model.parameters()))
"""


@pytest.mark.gloo
def test_a_module_of_a_script_survives_the_loss_of_a_stage(tmp_path):
    printed = []
    for plan in ("data=1", "pipeline=2"):
        folder = tmp_path / plan
        folder.mkdir()
        (folder / "own.py").write_text(OWN)
        if plan == "data=1":
            (folder / "killed").touch()
        env = {**os.environ, "PLAN": plan}
        done = forked.call([sys.executable, "own.py"], env=env, cwd=folder, launches=True)
        assert done.returncode == 0, done.stderr
        assert (folder / "killed").exists()
        printed.append(done.stdout.splitlines()[-1])
    assert printed[0] == printed[1] and printed[0].endswith(" 6")


def test_what_a_plan_cannot_do_is_refused_before_it_starts(tmp_path):
    for flags, text in (
        (
            ["--plan", "pipeline=2", "--workers", "3"],
            "workers = data × pipeline = data × 2, and the number of",
        ),
        (["--plan", "data=2,pipeline=2", "--workers", "2"], "= 2 × 2 = 4, and the number of workers is 2"),
        (["--plan", "pipeline=2", "--audit", "3"], "--audit needs the whole state"),
        (["--plan", "pipeline=2,cuts=nothing"], "no layer 'nothing'"),
        (["--plan", "rows=2"], "unknown key 'rows'"),
        (["--plan", "spatial=4"], "set train.bands=4, which is part of the identity"),
        (["--plan", "channel=2", "--workers", "3"], "workers = data × channel = data × 2, and the number of"),
    ):
        done = forked.call(train_command(tmp_path, *flags), launches=True)
        assert done.returncode == 2 and text in done.stderr, done.stderr
        assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert not (tmp_path / "run").exists()
