"""Fused and compiled kernels with channel=C, by Triton's interpreter: the weights of one worker."""

import pytest
from plan_runs import hashes, run_script
from small import summary

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
    layers = [nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 20, 3), nn.ReLU()]
    layers += [nn.MaxPool2d(2)]
    head = [nn.Flatten(), nn.Linear(20, 33), nn.ReLU(), nn.Dropout(0.3), nn.Linear(33, 10)]
    return nn.Sequential(*layers, *head)

def residual():
    return TinyResNet(BasicBlock(8, 17, 2), channels=17, colours=1)

def layers():
    first = [nn.Conv2d(1, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*first, nn.Conv2d(6, 13, 3), nn.ReLU(), nn.Flatten(), nn.Linear(13 * 4, 10))

interpreter.leave_out_fingerprints()
model, kernels, plan, *more = sys.argv[1:]
keys = ["data.size=8", "data.num_train=4", "data.num_test=3", "train.batch=4", "train.epochs=1"]
keys += ["train.lanes=2", "train.ema=0.9", "train.clip=1.0", f"kernels.set={kernels}", *more]
run = from_table(merge(to_table(lockstep.recipe("shapes")), parse_overrides(keys)))
torch.manual_seed(0)
launch = lockstep.Launch(name="run", runs_dir=Path(), device="cpu", plan=plan, quiet=True)
lockstep.train(run, {"chain": chain, "residual": residual, "layers": layers}[model](), launch=launch)
"""
PLANS = [
    ("chain", "fused", ["channel=2", "channel=3", "data=2,channel=2", "pipeline=2,channel=2,cost=counted"]),
    ("residual", "fused", ["channel=2", "channel=3"]),
    ("layers", "compiled", ["channel=2", "channel=3", "data=2,channel=2"]),
]


@pytest.mark.gloo
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("model", "kernels", "plans"), PLANS)
def test_products_over_workers_give_the_bits_of_one(model, kernels, plans, tmp_path):
    alone = hashes(run_script(tmp_path / "alone", SCRIPT, model, kernels, "data=1"))
    for number, plan in enumerate(plans):
        found = run_script(tmp_path / str(number), SCRIPT, model, kernels, plan)
        assert hashes(found) == alone, plan
        layers = summary(found)["layers"]
        assert 0.3 < layers["share"] <= 1 and layers["busy_s"] > 0
        assert sum(row["channel_mb"] for row in layers["rows"]) > 0


@pytest.mark.gloo
def test_products_of_a_batch_that_grows(tmp_path):
    grows = ("train.batch=2@0,4@1", "train.epochs=2")
    for plan in ("data=1", "channel=2"):
        run_script(tmp_path / plan, SCRIPT, "layers", "compiled", plan, *grows)
    assert hashes(tmp_path / "data=1" / "run") == hashes(tmp_path / "channel=2" / "run")
