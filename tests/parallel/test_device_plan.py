"""Fused and compiled kernels under plans, by Triton's interpreter: the weights of one worker."""

import pytest
from plan_runs import hashes, run_script

SCRIPT = """
import os, sys
from pathlib import Path
import torch, lockstep
from torch import nn
from lockstep.spec.run_file import from_table, merge, parse_overrides, to_table

sys.path.insert(0, os.environ["TESTS"])
import interpreter
from tiny_resnet import TinyResNet
from lockstep.models.resnet import BasicBlock

def chain():
    layers = [nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 5, 3), nn.ReLU()]
    head = [nn.Flatten(), nn.Linear(20, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 10)]
    return nn.Sequential(*layers, *head)

def residual():
    return TinyResNet(BasicBlock(8, 8, 1), BasicBlock(8, 16, 2), channels=16, colours=1)

interpreter.leave_out_fingerprints()
model, kernels, plan, *more = sys.argv[1:]
lanes, mb = {"chain": 4, "residual": 2}[model], 1e-4 if "shard" in plan else 25.0
keys = ["data.size=8", "data.num_train=8", "data.num_test=3", "train.batch=4", "train.epochs=1"]
keys += [f"train.lanes={lanes}", "train.ema=0.9", "train.clip=1.0", "data.augment=flip,crop:1"]
keys += [f"kernels.set={kernels}", *more]
run = from_table(merge(to_table(lockstep.recipe("shapes")), parse_overrides(keys)))
torch.manual_seed(0)
launch = lockstep.Launch(name="run", runs_dir=Path(), device="cpu", plan=plan, quiet=True, bucket_mb=mb)
lockstep.train(run, {"chain": chain, "residual": residual}[model](), launch=launch)
"""
PLANS = [
    ("chain", "fused", "pipeline=2"),
    ("chain", "fused", "pipeline=3,schedule=gpipe,cost=counted"),
    ("chain", "fused", "data=2,pipeline=2,cost=counted"),
    ("residual", "fused", "pipeline=2,cost=counted"),
    ("residual", "fused", "pipeline=3,schedule=gpipe,cost=counted"),
    ("residual", "compiled", "pipeline=2"),
    ("residual", "compiled", "data=2,pipeline=2,cuts=blocks.2"),
    ("chain", "fused", "data=3,shard=parameters"),
    ("chain", "fused", "data=2,pipeline=2,shard=parameters,cost=counted"),
    ("residual", "fused", "data=2,shard=parameters"),
    ("residual", "compiled", "data=2,shard=parameters"),
]
GROWS = ("train.batch=4@0,8@1", "train.epochs=2")


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The hashes of a run by one worker, computed once for each model and kernel set."""
    known = {}

    def find(model, kernels, *more):
        words = model, kernels, "data=1", *more
        if words not in known:
            known[words] = hashes(run_script(tmp_path_factory.mktemp("alone") / "one", SCRIPT, *words))
        return known[words]

    return find


@pytest.mark.gloo
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("model", "kernels", "plan"), PLANS)
def test_a_plan_gives_the_bits_of_one_worker(model, kernels, plan, reference, tmp_path):
    found = run_script(tmp_path / "split", SCRIPT, model, kernels, plan)
    assert hashes(found) == reference(model, kernels)


@pytest.mark.gloo
@pytest.mark.parametrize("plan", ["data=2", "pipeline=2,cost=counted", "data=2,shard=parameters"])
def test_a_plan_whose_batch_grows(plan, reference, tmp_path):
    found = run_script(tmp_path / "split", SCRIPT, "chain", "fused", plan, *GROWS)
    assert hashes(found) == reference("chain", "fused", *GROWS)
