"""The fingerprint of a run: what it tells apart, and that it leaves no trace."""

import random
import socket
import sys

import forked
import pytest
import torch
from small import OVERRIDES, small_run
from torch import nn


from lockstep.kernels.numerics import plain_torch, prepare_device
from lockstep.models.tensors import model_tensors, tensors_sha256
from lockstep.train.setup import set_up

KEYS = ("data.num_train=64", "data.num_test=10")
FUSED = ("kernels.set=fused", "data.size=8", "train.batch=4", "train.lanes=2")


def lane(*overrides, **given):
    """The fingerprint of a run's lane, without a run."""
    run = small_run(*KEYS, *overrides)
    with plain_torch():
        device = prepare_device("cpu", run.train.threads)
        before = model_tensors(given["model"]) if "model" in given else None
        expected = before and tensors_sha256(before)
        found = set_up(run, device, **given)
        assert expected is None or tensors_sha256(model_tensors(found.model)) == expected
    return found.identity["numerics.lane"]


class Net(nn.Sequential):
    """Batch norm and dropout; does something else in training, if told so."""

    def __init__(self, seed=0, also=lambda x: x):
        torch.manual_seed(seed)
        layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3)]
        super().__init__(*layers, nn.Linear(4 * 14 * 14, 10))
        nn.init.uniform_(self[1].running_mean)
        self.also = [also]

    def forward(self, x):
        return super().forward(self.also[0](x) if self.training else x)


def test_it_is_the_run_s_own_lane_and_leaves_no_trace():
    """Other weights and data are the same fingerprint; another model, precision or size of lanes another."""
    torch.manual_seed(3)
    streams = torch.get_rng_state()
    found = [lane(), lane("data.noise=0.3"), lane("model.name=emotion48"), lane("train.precision=bf16")]
    found += [lane("train.lanes=2"), lane("train.label_smoothing=0.1"), lane("seed=1")]
    with torch.random.fork_rng():
        own = [lane(model=Net(seed)) for seed in (0, 1)]
    assert found[0] == found[1] == found[6] and len(set(found)) == 5 and all(len(h) == 16 for h in found)
    assert own[0] == own[1] != found[0] and len(own[0]) == 16
    assert torch.equal(torch.get_rng_state(), streams)


def test_it_sees_other_kernels():
    with torch.backends.mkldnn.flags(enabled=False):
        other = lane("model.name=emotion48")
    assert lane("model.name=emotion48") != other


def choosy(x):
    if x.any():
        raise ValueError("only zeros")
    return x


def test_what_cannot_be_hashed_says_why():
    assert lane(model=Net(also=choosy)) == "fails: ValueError"
    assert lane(model=Net(also=lambda x: x * random.random())) == "varies"


def test_fused_and_compiled_lanes_have_their_own():
    """By Triton's interpreter; a single lane stands for all where batch norms see all of them."""
    from tiny_resnet import TinyResNet

    found = []
    for keys in (FUSED, (*FUSED, "kernels.set=compiled"), (*FUSED, "train.sync_norm=true"), FUSED):
        torch.manual_seed(len(found))
        found.append(lane(*keys, model=TinyResNet(channels=8, colours=1)))
    assert found[0] == found[3] and len(set(found)) == 3


OTHER = """
import os, torch, lockstep
from pathlib import Path
from lockstep.spec.run_file import from_table, merge, parse_overrides, to_table
from lockstep.spec.world import read_world

world = read_world(os.environ)
if world and world.name == "1":
    torch.backends.mkldnn.set_flags(False)
run = from_table(merge(to_table(lockstep.recipe("shapes")), parse_overrides({keys})))
launch = lockstep.Launch(name="run", runs_dir=Path(), device="cpu", workers=2)
lockstep.train(run, launch=launch)
"""


@pytest.mark.gloo
def test_a_worker_whose_lane_differs_is_refused_by_name(tmp_path):
    path = tmp_path / "other.py"
    path.write_text(OTHER.format(keys=[*OVERRIDES, *KEYS, "model.name=emotion48"]))
    done = forked.call([sys.executable, str(path)], cwd=tmp_path, launches=True)
    assert done.returncode == 2, done.stderr
    assert f"worker 1 on {socket.gethostname()} has numerics.lane=" in done.stderr, done.stderr
    assert not (tmp_path / "run" / "checkpoints").exists()
