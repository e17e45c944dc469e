"""Every rule against torch.optim in float64, and rule 10: an element's update knows no slice."""

import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from lockstep.runs.train_state import TrainState, init_memory
from lockstep.spec import Optimizer
from lockstep.spec.rule.optimizer_rule import RULES
from lockstep.spec.rule.update_rule import OPTIMIZERS
from lockstep.train.optimizer import update_params

STEPS, LR = 6, 0.03
ELEMENTWISE = [name for name, rule in RULES.items() if not rule.whole]  # the others: test_whole_rules.py
REFERENCES = {
    "sgd": lambda p, wd: torch.optim.SGD(p, LR, weight_decay=wd),
    "momentum": lambda p, wd: torch.optim.SGD(p, LR, momentum=0.8, weight_decay=wd),
    "nag": lambda p, wd: torch.optim.SGD(p, LR, momentum=0.8, weight_decay=wd, nesterov=True),
    "adagrad": lambda p, wd: torch.optim.Adagrad(p, LR, eps=1e-3, weight_decay=wd),
    "adadelta": lambda p, wd: torch.optim.Adadelta(p, LR, rho=0.8, eps=1e-3, weight_decay=wd),
    "rmsprop": lambda p, wd: torch.optim.RMSprop(p, LR, alpha=0.8, eps=1e-3, weight_decay=wd),
    "adam": lambda p, wd: torch.optim.Adam(p, LR, betas=(0.8, 0.9), eps=1e-3, weight_decay=wd),
    "adamw": lambda p, wd: torch.optim.AdamW(p, LR, betas=(0.8, 0.9), eps=1e-3, weight_decay=wd),
}
GIVEN = {"momentum": 0.8, "eps": 1e-3, "rho": 0.8, "alpha": 0.8, "beta1": 0.8, "beta2": 0.9}
SHAPES = [(7, 5), (13,), (), (2, 3, 3, 3)]
SIZES = [1, 3, 7, 8, 13, 33, 1021]  # few are multiples of a vector's width


def rule(name: str, weight_decay: float) -> Optimizer:
    options = {key: GIVEN[key] for key in OPTIMIZERS[name]}
    return Optimizer(name, weight_decay=weight_decay, options=options)


def randoms(shapes, seed: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, dtype=dtype, generator=generator) for shape in shapes]


def train(
    optimizer: Optimizer,
    params: list[Tensor],
    grads: list[list[Tensor]],
    decayed: list[bool] | None = None,
) -> dict[str, list[Tensor]]:
    state = init_memory(optimizer, params)
    for step, row in enumerate(grads):
        update_params(optimizer, LR, step, params, [grad.clone() for grad in row], state, decayed)
    return state


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_equals_torch_in_float64(name: str, weight_decay: float) -> None:
    ours = randoms(SHAPES, 0, torch.float64)
    theirs = [torch.nn.Parameter(p.clone()) for p in ours]
    grads = [randoms(SHAPES, step + 1, torch.float64) for step in range(STEPS)]
    reference = REFERENCES[name](theirs, weight_decay)
    for row in grads:
        for p, grad in zip(theirs, row, strict=True):
            p.grad = grad.clone()
        reference.step()
    train(rule(name, weight_decay), ours, grads)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b.detach(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_norms_and_biases_without_decay_equal_torch_in_float64(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3)).double()
    optimizer = replace(rule(name, 0.1), decay_norms=False)
    state = TrainState.begin(model, optimizer, 0.0)
    decayed = state.groups[0].decayed
    assert decayed == [True, False, False, False, True, False]
    params = list(state.trained().values())
    theirs = [torch.nn.Parameter(p.clone()) for p in params]
    grads = [randoms([p.shape for p in params], step + 1, torch.float64) for step in range(STEPS)]
    chosen = [(0.1, [theirs[0], theirs[4]]), (0.0, [theirs[i] for i in (1, 2, 3, 5)])]
    references = [REFERENCES[name](group, weight_decay) for weight_decay, group in chosen]
    for row in grads:
        for p, grad in zip(theirs, row, strict=True):
            p.grad = grad.clone()
        for reference in references:
            reference.step()
    train(optimizer, params, grads, decayed)
    for a, b in zip(params, theirs, strict=True):
        torch.testing.assert_close(a, b.detach(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_an_update_does_not_depend_on_the_slice_it_is_in(name: str, weight_decay: float) -> None:
    optimizer = rule(name, weight_decay)
    params = randoms(SIZES, 0, torch.float32)
    grads = [randoms(SIZES, step + 1, torch.float32) for step in range(STEPS)]
    joined = [torch.cat(params)]
    memory = train(optimizer, joined, [[torch.cat(row)] for row in grads])
    ends = torch.tensor(SIZES).cumsum(0).tolist()[:-1]
    parts = [p.clone() for p in params]
    part_memory = train(optimizer, parts, grads)
    assert all(torch.equal(a, b) for a, b in zip(joined[0].tensor_split(ends), parts, strict=True))
    for key, (whole,) in memory.items():
        assert torch.equal(whole, torch.cat(part_memory[key]))


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_an_update_does_not_depend_on_where_a_slice_begins(name: str) -> None:
    optimizer = rule(name, 0.1)
    (params,) = randoms([257], 0, torch.float32)
    grads = [randoms([257], step + 1, torch.float32) for step in range(STEPS)]
    whole = [params.clone()]
    train(optimizer, whole, grads)
    for first, last in [(0, 1), (1, 2), (3, 20), (5, 257), (64, 131)]:
        part = [params.clone()[first:last]]  # not aligned
        train(optimizer, part, [[grad[first:last]] for (grad,) in grads])
        assert torch.equal(part[0], whole[0][first:last])


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_an_update_does_not_depend_on_the_memory_format(name: str) -> None:
    optimizer = rule(name, 0.1)
    params = randoms([(4, 3, 3, 5)], 0, torch.float32)
    grads = [randoms([(4, 3, 3, 5)], step + 1, torch.float32) for step in range(STEPS)]
    other = [params[0].to(memory_format=torch.channels_last).clone()]
    train(optimizer, params, grads)
    train(optimizer, other, [[g.to(memory_format=torch.channels_last) for g in row] for row in grads])
    assert torch.equal(params[0], other[0])


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_a_zero_gradient_without_decay_from_the_start_changes_nothing(name: str) -> None:
    params = randoms([(9,)], 0, torch.float32)
    before = params[0].clone()
    train(rule(name, 0.0), params, [[torch.zeros(9)]] * 3)
    assert torch.equal(params[0], before)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_portions_that_fit_a_cache_change_no_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = [(7, 5), (101,), (), (3, 2), (4, 3, 5, 5)]
    decayed = [True, False, True, True, False]
    found = []
    for portion in (10**9, 16):
        monkeypatch.setattr(sys.modules[update_params.__module__], "PORTION", portion)
        params = randoms(shapes, 0, torch.float32)
        params[-1] = params[-1].to(memory_format=torch.channels_last)
        memory = train(
            rule(name, 0.1), params, [randoms(shapes, step, torch.float32) for step in (1, 2)], decayed
        )
        found.append([*params, *(tensor for tensors in memory.values() for tensor in tensors)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
