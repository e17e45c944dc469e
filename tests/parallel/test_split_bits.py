"""The promise where layers are over workers: one worker's weights, whatever rows and channels each has."""

import os
import signal
import sys
from pathlib import Path

import forked
import pytest
from job import Job
from plan_runs import HASHES, hashes, run
from small import summary, train_command

GRID = ("train.bands=4", "train.slices=4", "train.ema=0.9", "train.clip=1.0", "train.epochs=1")
SMALL = (*GRID, "train.batch=8", "train.lanes=2", "data.num_train=16", "data.num_test=9")
NO_GRID = (
    "train.epochs=1",
    "data.num_train=16",
    "data.num_test=9",
    "data.size=32",
    "train.channels_last=true",
)
MODELS = {
    "lenet5": (*GRID, "data.size=32", "data.num_train=96", "data.augment=flip,crop"),
    "resnet18": (*SMALL, "model.name=resnet18", "data.size=32"),
    "channels last": (*SMALL, "data.size=32", "data.channels=3", "train.channels_last=true"),
    "channels last, no grid": (*NO_GRID, "train.batch=8", "train.lanes=2", "model.name=resnet18"),
    "googlenet": (*SMALL, "model.name=googlenet", "data.size=32", "train.batch=4"),
}
COVERING = [
    ("lenet5", "spatial=4"),
    ("lenet5", "channel=3"),
    ("lenet5", "data=2,spatial=2,shard=parameters"),
    ("lenet5", "data=3,spatial=2"),
    ("lenet5", "pipeline=2,channel=2"),
    ("resnet18", "channel=2,spatial=2"),
    ("channels last", "spatial=2"),
    ("channels last, no grid", "channel=2"),
    ("googlenet", "channel=2"),
]
U_SHAPED = Path(__file__).parent / "u_shaped.py"


@pytest.mark.gloo
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("model", "plan"), COVERING)
def test_layers_over_workers_give_the_bits_of_one_worker(model, plan, by_one_worker, tmp_path):
    alone = by_one_worker(*MODELS[model])
    run(tmp_path, "--plan", plan, overrides=MODELS[model])
    assert hashes(tmp_path / "run") == {key: alone.get(key) for key in HASHES}


@pytest.mark.gloo
@pytest.mark.timeout(600)
def test_every_kind_of_layer_gives_the_bits_of_one_worker(tmp_path):
    found = []
    for plan in ("data=1", "spatial=3", "channel=2,spatial=2"):
        folder = tmp_path / plan
        command = [sys.executable, str(U_SHAPED), plan, "24", str(folder)]
        done = forked.call(command, launches=True)
        assert done.returncode == 0, done.stderr
        found.append(hashes(folder / "run"))
    assert found[1:] == found[:1] * 2


@pytest.mark.gloo
def test_a_run_goes_on_under_another_plan_for_its_layers(by_one_worker, tmp_path):
    overrides = (*MODELS["lenet5"], "checkpoint.keep=99", "checkpoint.every_steps=1")
    run(tmp_path, "--plan", "spatial=2", overrides=overrides)
    for path in (*(tmp_path / "run" / "checkpoints").glob("step-*[23]*"), tmp_path / "run" / "summary.json"):
        path.unlink()
    run(tmp_path, "--plan", "channel=2", "--resume", str(tmp_path / "run"), overrides=overrides)
    assert hashes(tmp_path / "run")["weights_sha256"] == by_one_worker(*MODELS["lenet5"])["weights_sha256"]


@pytest.mark.gloo
def test_a_lost_worker_of_a_lane_costs_no_bit(by_one_worker, tmp_path):
    with Job(tmp_path, "--plan", "spatial=2", overrides=MODELS["lenet5"], paced=True) as job:
        job.wait_for_steps(1)
        os.kill(job.workers()["1"], signal.SIGKILL)
        job.wait_for(lambda: "1" not in job.workers(), "the loss")
        job.hurry()
        job.process.communicate()
        assert job.process.returncode == 0, job.errors()
    assert summary(tmp_path / "run")["weights_sha256"] == by_one_worker(*MODELS["lenet5"])["weights_sha256"]


@pytest.mark.gloo
def test_rows_need_a_grid(tmp_path):
    done = forked.call(train_command(tmp_path, "--plan", "spatial=2"))
    assert done.returncode == 2
    assert "train.bands=2" in done.stderr
    assert not (tmp_path / "run").exists()
