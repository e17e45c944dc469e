"""The fingerprint of a run: what it tells apart, and that it leaves no trace."""

import random
import socket
import sys

import forked
import pytest
import torch
from small import OVERRIDES, small_run
from torch import nn

from lockstep.errors import OutOfMemory
from lockstep.kernels.numerics import plain_torch, prepare_device
from lockstep.models.tensors import model_tensors, tensors_sha256
from lockstep.train.lane_fingerprint import fingerprint_lane
from lockstep.train.setup import Given, set_up

KEYS = ("data.num_train=64", "data.num_test=10")
FUSED = ("kernels.set=fused", "data.size=8", "train.batch=4", "train.lanes=2")


def lane(*overrides, **given):
    """The fingerprint of a run's lane, without a run; computed once more, it changes nothing."""
    run = small_run(*KEYS, *overrides)
    with plain_torch(), torch.random.fork_rng():
        setup = set_up(run, prepare_device("cpu", run.train.threads), Given(**given))
        model, stream = setup.model, torch.get_rng_state()
        expected = tensors_sha256(model_tensors(model))
        found = fingerprint_lane(run, model, setup.loss, setup.store, setup.lowering, is_own=bool(given))
        assert found == setup.identity["numerics.lane"]
        assert tensors_sha256(model_tensors(model)) == expected
        assert torch.equal(torch.get_rng_state(), stream)
        assert not any("forward" in vars(module) for module in model.modules())
    return found


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


def test_it_is_the_lane_of_the_run():
    """Other weights and data have the same one; another model, precision, loss or size of lanes another."""
    found = [lane(), lane("data.seed=1"), lane("seed=1"), lane("model.name=emotion48")]
    found += [lane("train.precision=bf16"), lane("train.lanes=2"), lane("train.label_smoothing=0.1")]
    own = [lane(model=Net(seed)) for seed in (0, 1)]
    assert found[0] == found[1] == found[2] and len(set(found)) == 5
    assert own[0] == own[1] and all(len(text) == 16 for text in (*found, *own))


def test_it_sees_other_kernels():
    try:
        torch._C._set_mkldnn_enabled(False)  # torch.backends.mkldnn warns of what is not here
        other = lane("model.name=emotion48")
    finally:
        torch._C._set_mkldnn_enabled(True)
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
    torch._C._set_mkldnn_enabled(False)
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
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr  # for both workers
    assert f"worker 1 on {socket.gethostname()} has numerics.lane=" in done.stderr, done.stderr
    assert not (tmp_path / "run" / "checkpoints").exists()


def too_large(x):
    """As a GPU would, that has no memory for a whole lane of the model."""
    if len(x) > 2:
        raise torch.OutOfMemoryError("CUDA out of memory")
    return x


def test_in_stages_a_lane_may_be_too_large_for_one_worker():
    run = small_run(*KEYS, "train.lanes=4")
    with plain_torch(), torch.random.fork_rng():
        device, given = prepare_device("cpu", run.train.threads), Given(model=Net(also=too_large))
        assert (
            set_up(run, device, given, in_stages=True).identity["numerics.lane"] == "too large for one worker"
        )
        with pytest.raises(OutOfMemory, match="--plan pipeline=2"):
            set_up(run, device, given)
