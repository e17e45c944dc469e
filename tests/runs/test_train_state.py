"""Hashes that see every bit and no layout; tensors and cursor that come back as they were."""

import hashlib
import json

import pytest
import torch
from torch import nn

from lockstep.models.tensors import tensors_sha256
from lockstep.runs.train_state import Totals, TrainState
from lockstep.spec import Optimizer


def state(rule: str = "adam", ema: float = 0.9) -> TrainState:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 2))
    made = TrainState.begin(model, Optimizer(rule), ema)
    for tensor in (t for values in made.memory.values() for t in values.values()):
        tensor.uniform_()
    for tensor in made.ema.values():
        tensor.uniform_()
    return made


def test_the_hash_is_over_name_dtype_shape_and_bytes() -> None:
    a, b = torch.tensor([[1.0, 2.0]]), torch.tensor(7)
    text = b"a\0float32\0(1, 2)\0" + a.numpy().tobytes() + b"b\0int64\0()\0" + b.numpy().tobytes()
    assert tensors_sha256({"b": b, "a": a}) == hashlib.sha256(text).hexdigest()


def test_the_hash_does_not_see_the_memory_format() -> None:
    x = torch.rand(2, 3, 4, 5)
    other = x.to(memory_format=torch.channels_last)
    assert other.stride() != x.stride()
    assert tensors_sha256({"x": x}) == tensors_sha256({"x": other})
    whole = state()
    before = whole.hashes()
    whole.model.to(memory_format=torch.channels_last)
    assert whole.hashes() == before


@pytest.mark.parametrize(
    "other",
    [
        {"y": torch.zeros(4)},
        {"x": torch.zeros(4, dtype=torch.int32)},
        {"x": torch.zeros(2, 2)},
        {"x": torch.zeros(5)},
        {"x": torch.tensor([0.0, 0.0, 0.0, -0.0])},
        {"x": torch.tensor([0.0, 0.0, 0.0, 1e-45])},
        {"x": torch.zeros(4), "y": torch.zeros(0)},
    ],
)
def test_the_hash_sees_name_dtype_shape_and_every_bit(other) -> None:
    assert tensors_sha256(other) != tensors_sha256({"x": torch.zeros(4)})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.bool, torch.uint8])
def test_every_dtype_has_a_hash(dtype: torch.dtype) -> None:
    zeros, ones = torch.zeros(3, dtype=dtype), torch.ones(3, dtype=dtype)
    assert tensors_sha256({"x": zeros}) != tensors_sha256({"x": ones})


def test_weights_optimizer_and_averages_have_hashes_of_their_own() -> None:
    whole = state()
    before = whole.hashes()
    assert before.keys() == {"weights_sha256", "optimizer_sha256", "ema_sha256"}
    whole.memory["mean"]["0.weight"].add_(1)
    after = whole.hashes()
    assert {key for key in before if before[key] != after[key]} == {"optimizer_sha256"}
    whole.model[1].running_mean.add_(1)
    assert whole.hashes()["weights_sha256"] != before["weights_sha256"]


def test_hashes_of_what_a_run_does_not_keep_are_absent() -> None:
    assert state("sgd", ema=0.0).hashes().keys() == {"weights_sha256"}


def test_tensors_are_copies_in_logical_order() -> None:
    whole = state()
    whole.model.to(memory_format=torch.channels_last)
    tensors = dict(whole.tensors())
    assert all(tensor.is_contiguous() for tensor in tensors.values())
    tensors["model.0.weight"].zero_()
    assert whole.model[0].weight.abs().sum() > 0


def test_tensors_come_back() -> None:
    whole, other = state(), state()
    with torch.no_grad():
        for p in other.model.parameters():
            p.zero_()
        other.memory["square"]["0.bias"].zero_()
        other.ema["3.bias"].zero_()
    assert other.hashes() != whole.hashes()
    other.load_tensors(dict(whole.tensors()))
    assert other.hashes() == whole.hashes()


def test_tensors_come_back_into_another_memory_format() -> None:
    whole, other = state(), state()
    other.model.to(memory_format=torch.channels_last)
    with torch.no_grad():
        other.model[0].weight.zero_()
    other.load_tensors(dict(whole.tensors()))
    assert other.hashes() == whole.hashes()
    assert other.model[0].weight.is_contiguous(memory_format=torch.channels_last)


def test_a_missing_or_further_tensor_is_named() -> None:
    whole = state()
    tensors = dict(whole.tensors())
    del tensors["model.0.bias"]
    with pytest.raises(KeyError, match=r"model\.0\.bias"):
        whole.load_tensors(tensors)
    with pytest.raises(KeyError, match=r"model\.extra"):
        whole.load_tensors(dict(whole.tensors()) | {"model.extra": torch.zeros(1)})


def test_a_tensor_of_another_shape_is_refused_and_nothing_is_loaded() -> None:
    whole = state()
    before = whole.hashes()
    tensors = {name: tensor * 0 for name, tensor in whole.tensors()}
    tensors["model.3.bias"] = torch.zeros(1)  # would spread over both elements
    with pytest.raises(KeyError, match=r"model\.3\.bias"):
        whole.load_tensors(tensors)
    assert whole.hashes() == before


def test_the_cursor_comes_back_through_json() -> None:
    whole, other = state(), state()
    whole.epoch, whole.step_in_epoch, whole.step = 3, 4, 34
    whole.totals = Totals(0.1 + 0.2, 17, 32)
    whole.best_score, whole.best_step, whole.evaluation = 1 / 3, 30, (0.7, 1 / 3)
    whole.worse_epochs = 2
    other.load_cursor(json.loads(json.dumps(whole.cursor())))
    assert other.cursor() == whole.cursor()
    assert other.totals == whole.totals
    assert other.evaluation == whole.evaluation


def test_frozen_parameters_have_no_memory() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].weight.requires_grad_(False)
    names = TrainState.begin(model, Optimizer("momentum"), 0.0).named()
    assert {name for name in names if name.startswith("optimizer.")} == {
        "optimizer.velocity.0.bias",
        "optimizer.velocity.1.weight",
        "optimizer.velocity.1.bias",
    }
