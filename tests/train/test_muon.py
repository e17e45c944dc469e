"""Muon against torch's and formulas in float64; matrices that are dealt to workers, against one for all."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from world import in_threads

from lockstep.runs.train_state import TrainState
from lockstep.spec import Optimizer
from lockstep.train.update.matrix_deal import deal_matrices, exchange_moves
from lockstep.train.update.muon import find_move
from lockstep.train.update.state_update import update_state

MUON = Optimizer("muon", lr=0.02, weight_decay=0.1, options={"rest_lr": 0.003})
STEPS = 3


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.Conv2d(6, 4, 1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(16, 40), nn.Linear(40, 5)).to(dtype)


def gradients(state: TrainState, seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return {name: torch.randn_like(p) for name, p in state.trained().items()}


def train(state: TrainState, rates: list[float]) -> None:
    for step in range(STEPS):
        update_state(state, step, rates, gradients(state, step))


def orthogonal(matrix: Tensor) -> Tensor:
    """By its singular values, each of which the polynomial moves by itself."""
    u, values, v = torch.linalg.svd(matrix, full_matrices=False)
    values = values / matrix.norm()
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return u * values @ v


@pytest.mark.parametrize("shape", [(8, 8), (5, 17), (17, 5), (6, 3, 3, 3), (40, 2, 1, 3), (1, 9)])
def test_a_move_is_the_published_polynomial_of_the_singular_values(shape) -> None:
    torch.manual_seed(0)
    given = torch.randn(shape, dtype=torch.float64)
    matrix = given.flatten(1)
    scale = max(1.0, matrix.shape[0] / matrix.shape[1]) ** 0.5
    expected = (orthogonal(matrix) * scale).view(shape)
    torch.testing.assert_close(find_move(given, shape), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(find_move(given.float(), shape), expected.float(), rtol=1e-3, atol=1e-4)
    values = torch.linalg.svdvals(find_move(given, shape).flatten(1)) / scale
    assert values.min() > 0.3 and values.max() < 1.3


def test_a_zero_gradient_moves_nothing() -> None:
    assert not find_move(torch.zeros(4, 3), (4, 3)).any()


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_it_is_torchs_muon(weight_decay, monkeypatch) -> None:
    """In two dimensions, where that rounds to bf16 no more."""
    monkeypatch.setattr(Tensor, "bfloat16", lambda tensor: tensor)
    torch.manual_seed(0)
    sizes = (12, 7), (7, 30), (30, 30), (30, 4)
    model = nn.Sequential(*(nn.Linear(*size, bias=False) for size in sizes)).double()
    theirs = [nn.Parameter(layer.weight.detach().clone()) for layer in model[:-1]]
    reference = torch.optim.Muon(theirs, lr=0.02, weight_decay=weight_decay, momentum=0.8)
    options = {**MUON.options, "momentum": 0.8}
    state = TrainState.begin(model, replace(MUON, weight_decay=weight_decay, options=options), 0.0)
    for step in range(STEPS):
        for p, grad in zip(theirs, gradients(state, step).values(), strict=False):
            p.grad = grad.clone()
        reference.step()
    train(state, [0.02, 0.003])
    for layer, p in zip(model, theirs, strict=False):
        torch.testing.assert_close(layer.weight.detach(), p.detach(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("rest", "kept"), [("adamw", {"mean", "square"}), ("momentum", {"velocity"})])
def test_norms_biases_and_the_last_layer_have_another_rule(rest, kept) -> None:
    optimizer = replace(MUON, options={**MUON.options, "rest": rest})
    plain = {key: optimizer.options[key] for key in Optimizer(rest).options}
    ours = TrainState.begin(network(), optimizer, 0.0)
    theirs = TrainState.begin(network(), Optimizer(rest, 0.003, 0.1, plain), 0.0)
    others = [name for name in ours.trained() if name not in ("0.weight", "2.weight", "4.weight")]
    assert [list(group.names) for group in ours.groups] == [["0.weight", "2.weight", "4.weight"], others]
    train(ours, [0.02, 0.003])
    train(theirs, [0.003])
    assert all(torch.equal(ours.trained()[n], theirs.trained()[n]) == (n in others) for n in ours.trained())
    assert {key for key in ours.memory if others[0] in ours.memory[key]} == kept
    assert {key for key in ours.memory if "0.weight" in ours.memory[key]} == {"velocity"}


def test_the_memory_format_changes_no_bit() -> None:
    states = [
        TrainState.begin(network().to(memory_format=kind), MUON, 0.0)
        for kind in (torch.contiguous_format, torch.channels_last)
    ]
    for state in states:
        for step in range(STEPS):
            torch.manual_seed(step)
            grads = {name: torch.randn(p.shape) for name, p in state.trained().items()}
            like = {n: torch.empty_like(p).copy_(grads[n]) for n, p in state.trained().items()}
            update_state(state, step, [0.02, 0.003], like)
    assert states[0].hashes() == states[1].hashes()


def test_matrices_are_dealt_by_cost() -> None:
    shapes = [(64, 3, 7, 7), *[(64, 64, 3, 3)] * 4, *[(512, 512, 3, 3)] * 3, (10, 4)]
    owners = deal_matrices(shapes, 3)
    assert sorted(owners[5:8]) == [0, 1, 2]
    assert deal_matrices(shapes, 3) == owners and set(deal_matrices(shapes, 1)) == {0}
    assert sorted(deal_matrices(shapes[:2], 4)) == [0, 1]


@pytest.mark.gloo
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("workers", [2, 3, 5])
def test_moves_of_all_workers_are_those_of_one(workers, dtype) -> None:
    def work(group):
        state = TrainState.begin(copy.deepcopy(model), MUON, 0.0)
        for step in range(STEPS):
            grads = {name: grad.clone() for name, grad in given[step].items()}
            before = state.hashes()
            moves = exchange_moves(state, grads, group)
            assert set(moves) == {"0.weight", "2.weight", "4.weight"} and state.hashes() == before
            update_state(state, step, [0.02, 0.003], grads, moves)
        return state.hashes()

    model = network(dtype)
    alone = TrainState.begin(copy.deepcopy(model), MUON, 0.0)
    given = [gradients(alone, step) for step in range(STEPS)]
    train(alone, [0.02, 0.003])
    assert in_threads(workers, work) == [alone.hashes()] * workers
