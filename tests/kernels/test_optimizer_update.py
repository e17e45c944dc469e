"""The optimizer on the device against the one of the host: every bit of weights, memory and averages."""

from __future__ import annotations

import pytest
import torch

from lockstep.kernels.triton.optimizer_update import ALIGN, step_values, update_flat
from lockstep.runs.train_state import init_memory
from lockstep.spec import Optimizer
from lockstep.spec.run import OPTIMIZERS
from lockstep.train import optimizer as rules

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZE, STEPS = 1500, 3


@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
@pytest.mark.parametrize("name", OPTIMIZERS)
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
        update_flat(optimizer, ours, grad, memory, average, copy, values, cursor, good, len(ours))
        rules.update_params(optimizer, rates[step], step, [host], [grad.clone()], state)
        averaged = averaged * decay + host * (1.0 - decay)
    assert torch.equal(ours, host) and torch.equal(copy, host)
    assert torch.equal(average, averaged)
    for one, (other,) in zip(memory, state.values(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", OPTIMIZERS)
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
        update_flat(optimizer, ours, grad, memory, None, copy, values, cursor, good, len(ours), decayed)
        grads = [part.clone() for part in grad.split(sizes)]
        rules.update_params(optimizer, 0.1, step, host, grads, state, chosen)
    assert torch.equal(ours, torch.cat(host))
    for one, parts in zip(memory, state.values(), strict=True):
        assert torch.equal(one, torch.cat(parts))


def test_a_step_that_is_not_finite_changes_nothing() -> None:
    weights = torch.randn(SIZE, device=DEVICE)
    before, bad = weights.clone(), torch.ones(1, dtype=torch.int32, device=DEVICE)
    rest = [torch.zeros(SIZE, device=DEVICE) for _ in range(3)]
    optimizer = Optimizer("adam")
    values = torch.tensor([step_values(optimizer, 0.1, 0.0, 0)], device=DEVICE)
    cursor = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    update_flat(optimizer, weights, before, rest[:2], None, rest[2], values, cursor, bad, len(weights))
    assert torch.equal(weights, before) and not any(tensor.any() for tensor in rest)
