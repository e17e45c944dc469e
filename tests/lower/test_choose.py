"""Which kernels `auto` takes: a lookup by device, precision and model, here for a GPU that is not there."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lockstep.cli.doctor import _kernels
from lockstep.errors import ModelError, SpecError
from lockstep.kernels.loss import make_loss
from lockstep.lower.choose import explain_stock, lower_for_device
from lockstep.models import build
from lockstep.spec import Kernels, Run, Train

HOPPER, AMPERE = (9, 0), (8, 0)
CASES = [
    ("emotion48", 48, HOPPER, "bf16", "fused"),
    ("emotion48", 48, AMPERE, "tf32", "fused"),
    ("emotion48", 48, HOPPER, "fp32", "compiled"),
    ("resnet18", 32, HOPPER, "bf16", "fused"),
    ("resnet18", 32, AMPERE, "bf16", "compiled"),
    ("resnet18", 32, HOPPER, "tf32", "compiled"),
    ("resnet50", 128, HOPPER, "bf16", "compiled"),
    ("googlenet", 64, AMPERE, "bf16", "compiled"),
    ("googlenet", 64, HOPPER, "tf32", "compiled"),
]


def find(name: str, side: int, *, trains: bool = True, kernels: str = "auto", **keys: object) -> str | None:
    run = Run(train=Train(batch=16, lanes=2, **keys), kernels=Kernels(set=kernels))
    with torch.device("meta"):
        model = build(name, in_channels=3, num_classes=10, image_size=(side, side))
    lowering = lower_for_device(
        run, model, make_loss(run.train), (3, side, side), torch.device("cuda"), trains
    )
    return lowering.facts()["set"] if lowering else None


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch):
    def pretend(capability: tuple[int, int]) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a GPU")

    return pretend


@pytest.mark.parametrize(("name", "side", "capability", "precision", "expected"), CASES)
def test_auto_is_a_lookup(name, side, capability, precision, expected, gpu) -> None:
    gpu(capability)
    assert find(name, side, precision=precision) == expected
    assert find(name, side, precision=precision, trains=False) == expected
    assert find(name, side, precision=precision, kernels="stock") is None


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_runs_lane_by_lane_on_a_gpu_names_what_is_in_the_way(precision, gpu) -> None:
    gpu(HOPPER)
    run, cuda, told = Run(train=Train(precision=precision)), torch.device("cuda"), list[str]()
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3, 10), torch.nn.LogSoftmax(1)).to("meta")
    assert lower_for_device(run, model, make_loss(run.train), (3, 1, 1), cuda, refusals=told) is None
    text = explain_stock(run, make_loss(run.train), cuda, told[-1])
    assert text.startswith("the model runs lane by lane with stock kernels") and "'2' (LogSoftmax)" in text
    assert not explain_stock(run, make_loss(run.train), torch.device("cpu"), "")
    assert not explain_stock(replace(run, kernels=Kernels(set="stock")), make_loss(run.train), cuda, "")
    assert not explain_stock(run, lambda logits, labels: logits.mean(), cuda, "")


def test_the_doctor_says_what_each_model_runs_with(gpu) -> None:
    gpu(HOPPER)
    found = _kernels(torch.device("cuda"))
    assert found["emotion48"] == "fused in bf16, fp16 and tf32, compiled in fp32"
    assert found["resnet18"] == "fused in bf16 and fp16, else compiled"
    assert found["alexnet"].startswith("compiled (`lockstep bench lanes`")


def test_shared_norms_want_a_fused_residual_network(gpu) -> None:
    gpu(HOPPER)
    assert find("resnet18", 32, precision="bf16", sync_norm=True) == "fused"
    with pytest.raises(ModelError, match=r"use kernels\.set=fused with a resnet on a GPU"):
        find("resnet50", 128, precision="bf16", sync_norm=True)
    gpu(AMPERE)
    assert find("resnet18", 32, precision="bf16", sync_norm=True, kernels="fused") == "fused"
    assert find("resnet18", 32, precision="bf16", sync_norm=True, trains=False) == "compiled"


def test_a_table_that_is_not_there_is_refused_for_any_kernels() -> None:
    run = Run(kernels=Kernels(table="nowhere.toml"))
    with pytest.raises(SpecError, match=r"nowhere\.toml: there is no such file"):
        lower_for_device(run, torch.nn.Linear(1, 1), make_loss(run.train), (1, 1, 1), torch.device("cpu"))
