"""The optimizer on the device against the one of the host: every bit of weights, memory and averages."""

from __future__ import annotations

import pytest
import torch

from lockstep.kernels.triton.optimizer_update import (
    ALIGN,
    FlatGroup,
    FlatTables,
    Trust,
    step_values,
    update_flat,
)
from lockstep.runs.train_state import init_memory
from lockstep.spec import Optimizer
from lockstep.spec.rule.optimizer_rule import RULES
from lockstep.train import optimizer as rules
from lockstep.train.update.trust_ratio import trust_ratios

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZE, STEPS = 1500, 3
ELEMENTWISE = [name for name, rule in RULES.items() if not rule.whole]


@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_every_rule_is_the_hosts(name: str, weight_decay: float) -> None:
    torch.manual_seed(0)
    optimizer = Optimizer(name, lr=0.1, weight_decay=weight_decay)
    host = torch.randn(SIZE, device=DEVICE)
    ours, average, copy = host.clone(), host.clone(), torch.zeros_like(host)
    state, averaged = init_memory(optimizer, [host]), host.clone()
    memory = [torch.zeros_like(host) for _ in state]
    rates, decay = [0.1 / (step + 1) for step in range(STEPS)], 0.9
    values = torch.tensor([step_values(optimizer, rates[n], decay, n) for n in range(STEPS)], device=DEVICE)
    good = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    for step in range(STEPS):
        grad, cursor = torch.randn(SIZE, device=DEVICE), torch.tensor([step], device=DEVICE)
        tables = FlatTables(ours, grad, average, copy, cursor, good, len(ours))
        update_flat(tables, FlatGroup(optimizer, memory, values))
        rules.update_params(optimizer, rates[step], step, [host], [grad.clone()], state)
        averaged = averaged * decay + host * (1.0 - decay)
    assert torch.equal(ours, host) and torch.equal(copy, host)
    assert torch.equal(average, averaged)
    for one, (other,) in zip(memory, state.values(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_what_has_no_decay_is_the_hosts(name: str) -> None:
    torch.manual_seed(0)
    optimizer = Optimizer(name, lr=0.1, weight_decay=0.1, decay_norms=False)
    sizes, chosen = [3 * ALIGN, ALIGN, 17 * ALIGN], [True, False, True]
    ours = torch.randn(sum(sizes), device=DEVICE)
    host = [part.clone() for part in ours.split(sizes)]
    state, copy = init_memory(optimizer, host), torch.zeros_like(ours)
    memory = [torch.zeros_like(ours) for _ in state]
    blocks = torch.cat([torch.full((n // ALIGN,), on) for n, on in zip(sizes, chosen, strict=True)])
    decayed = blocks.to(DEVICE, torch.uint8)
    values = torch.tensor([step_values(optimizer, 0.1, 0.0, n) for n in range(STEPS)], device=DEVICE)
    good = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    for step in range(STEPS):
        grad, cursor = torch.randn_like(ours), torch.tensor([step], device=DEVICE)
        tables = FlatTables(ours, grad, None, copy, cursor, good, len(ours))
        update_flat(tables, FlatGroup(optimizer, memory, values, decayed))
        grads = [part.clone() for part in grad.split(sizes)]
        rules.update_params(optimizer, 0.1, step, host, grads, state, chosen)
    assert torch.equal(ours, torch.cat(host))
    for one, parts in zip(memory, state.values(), strict=True):
        assert torch.equal(one, torch.cat(parts))


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_trust_ratios_are_the_hosts(name: str, weight_decay: float) -> None:
    torch.manual_seed(0)
    optimizer = Optimizer(name, lr=0.1, weight_decay=weight_decay)
    sizes, chosen = [3 * ALIGN, ALIGN, 17 * ALIGN], [True, False, True]
    ours = torch.randn(sum(sizes), device=DEVICE)
    host, average = [part.clone() for part in ours.split(sizes)], ours.clone()
    state, copy = init_memory(optimizer, host), torch.zeros_like(ours)
    memory = [torch.zeros_like(ours) for _ in state]
    owners, decayed = (
        torch.cat([torch.full((n // ALIGN,), mark) for n, mark in zip(sizes, marks, strict=True)]).to(DEVICE)
        for marks in ([1, 0, 2], [1, 0, 1])
    )
    ratios = torch.ones(3, device=DEVICE)

    def find(p: torch.Tensor, g: torch.Tensor) -> None:
        ratios[1:] = trust_ratios(optimizer, *(list(flat.split(sizes)[::2]) for flat in (p, g)))

    trust = Trust(owners.int(), ratios, find)
    values = torch.tensor([step_values(optimizer, 0.1, 0.5, n) for n in range(STEPS)], device=DEVICE)
    good, averaged = torch.zeros(1, dtype=torch.int32, device=DEVICE), ours.clone()
    for step in range(STEPS):
        grad, cursor = torch.randn_like(ours), torch.tensor([step], device=DEVICE)
        grads = [part.clone() for part in grad.split(sizes)]
        tables = FlatTables(ours, grad, average, copy, cursor, good, len(ours))
        update_flat(tables, FlatGroup(optimizer, memory, values, decayed.to(torch.uint8), trust=trust))
        rules.update_params(optimizer, 0.1, step, host, grads, state, chosen)
        averaged = averaged * 0.5 + torch.cat(host) * 0.5
    assert torch.equal(ours, torch.cat(host)) and torch.equal(copy, ours)
    assert torch.equal(average, averaged) and not torch.equal(ratios[1:], torch.ones_like(ratios[1:]))
    for one, parts in zip(memory, state.values(), strict=True):
        assert torch.equal(one, torch.cat(parts))


def test_a_step_that_is_not_finite_changes_nothing() -> None:
    weights = torch.randn(SIZE, device=DEVICE)
    before, bad = weights.clone(), torch.ones(1, dtype=torch.int32, device=DEVICE)
    rest = [torch.zeros(SIZE, device=DEVICE) for _ in range(3)]
    optimizer = Optimizer("adam")
    values = torch.tensor([step_values(optimizer, 0.1, 0.0, 0)], device=DEVICE)
    cursor = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    tables = FlatTables(weights, before, None, rest[2], cursor, bad, len(weights))
    update_flat(tables, FlatGroup(optimizer, rest[:2], values))
    assert torch.equal(weights, before) and not any(tensor.any() for tensor in rest)
