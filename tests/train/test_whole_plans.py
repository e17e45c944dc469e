"""Rules that look at whole parameters: one hash by any number of workers, and under every plan.

At 40 pixels a weight of LeNet-5 has more than 2¹⁶ values, so that other rules would cut it into shares.
"""

import copy
from dataclasses import replace

import pytest
import torch
from plan_runs import HASHES, hashes, run
from torch import nn
from torch.nn import functional as F
from world import in_threads

from lockstep.comm.mesh import plain_mesh
from lockstep.comm.tree import worker_lanes
from lockstep.data.loader import Lanes
from lockstep.lower.choose import lower_for_host
from lockstep.runs.train_state import TrainState
from lockstep.spec import Optimizer, Run, Train
from lockstep.train.step import Step

KEYS = (
    *("data.size=40", "data.num_train=64", "data.num_test=16", "train.batch=16", "train.lanes=8"),
    *("train.epochs=1", "optimizer.weight_decay=0.01"),
)
RUNS = {
    "lars": (*KEYS, "optimizer.name=lars", "optimizer.lr=5", "train.clip=1.0", "train.ema=0.9"),
    "lamb": (*KEYS, "optimizer.name=lamb", "optimizer.lr=0.02", "train.wire=bf16"),
    "muon": (*KEYS, "optimizer.name=muon", "optimizer.lr=0.02", "optimizer.rest=momentum"),
}
COVERING = [
    ("lars", "data=2,shard=optimizer"),
    ("lars", "data=4,shard=parameters"),
    ("lamb", "data=4,shard=optimizer"),
    ("lamb", "data=2,shard=parameters"),
    ("lamb", "pipeline=2"),
    ("muon", "data=3"),
    ("muon", "data=4,shard=gradients,replicas=2"),
    ("muon", "data=2,shard=parameters"),
    ("muon", "data=2,pipeline=2"),
]
LANES, SAMPLES = 8, 2


def train(rule: Optimizer, workers: int, model: nn.Module) -> dict[str, str]:
    """Three steps by workers that are threads."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(LANES, SAMPLES, 3, 6, 6, generator=generator)
    labels = torch.randint(0, 5, (LANES, SAMPLES), generator=generator)
    settings = Train(batch=LANES * SAMPLES, lanes=LANES, clip=1.0, ema=0.9)

    def work(group):
        own, mine = worker_lanes(LANES, group.size, group.rank), copy.deepcopy(model)
        part = slice(own.start, own.stop)
        lanes = Lanes(images[part].flatten(0, 1), labels[part].flatten(), len(own), own.start)
        state = TrainState.begin(mine, rule, 0.9)
        lowered = lower_for_host(mine, F.cross_entropy, seed=0, half=None)
        step = Step(Run(train=settings, optimizer=rule), state, lowered, 10, plain_mesh(group))
        for _ in range(3):
            step(lanes)
        step.close()
        return state.hashes()

    found = in_threads(workers, work)
    assert all(other == found[0] for other in found)
    return found[0]


@pytest.mark.gloo
@pytest.mark.parametrize("name", RUNS)
def test_any_number_of_workers(name):
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 12, 3), nn.BatchNorm2d(12), nn.ReLU(), nn.Conv2d(12, 6, 3), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(24, 40), nn.Linear(40, 5))
    rule = replace(Optimizer(name), weight_decay=0.01)
    alone = train(rule, 1, model)
    for workers in (2, 3, 4, 8):
        assert train(rule, workers, model) == alone


@pytest.mark.gloo
@pytest.mark.parametrize(("name", "plan"), COVERING)
def test_a_plan_gives_the_bits_of_one_worker(name, plan, by_one_worker, tmp_path):
    alone = by_one_worker(*RUNS[name])
    run(tmp_path, "--plan", plan, overrides=RUNS[name])
    assert hashes(tmp_path / "run") == {key: alone.get(key) for key in HASHES}


@pytest.mark.gloo
def test_a_run_goes_on_in_mid_epoch_with_other_workers(by_one_worker, tmp_path):
    keys = (*RUNS["muon"], "checkpoint.every_steps=1", "checkpoint.keep=9")
    run(tmp_path, "--workers", "2", overrides=keys)
    for path in (tmp_path / "run" / "checkpoints").glob("step-*"):
        if int(path.stem[5:]) > 2:
            path.unlink()
    (tmp_path / "run" / "summary.json").unlink()
    run(tmp_path, "--plan", "data=3,shard=optimizer", "--resume", "auto", overrides=keys)
    alone = by_one_worker(*RUNS["muon"])
    assert hashes(tmp_path / "run") == {key: alone.get(key) for key in HASHES}
