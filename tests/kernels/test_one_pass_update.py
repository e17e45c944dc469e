"""The update in one pass has the bits of PyTorch's operations, one after another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from lockstep.kernels import one_pass_update as one_pass
from lockstep.native import c_library
from lockstep.spec import Optimizer
from lockstep.spec.rule.optimizer_rule import RULES
from lockstep.train import optimizer as host

SHAPES = [(3, 5, 7, 7), (100, 33), (17,), (), (64, 32, 3, 3), (0,), (70_001,)]
DECAYED = [True, False, True, True, True, True, True]
LAST = torch.channels_last
CPU = torch.device("cpu")


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def updated(optimizer: Optimizer, *, in_one_pass: bool) -> list[Tensor]:
    """Weights and memory after some steps, whose gradients grow from nearly nothing."""
    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(shape, generator=generator) for shape in SHAPES]
    params[4] = params[4].to(memory_format=LAST)
    memory = {name: [torch.zeros_like(p) for p in params] for name in RULES[optimizer.name].memory}
    with pytest.MonkeyPatch.context() as patch:
        if not in_one_pass:
            patch.setattr(host, "update_in_one_pass", lambda *given: list(range(len(params))))
        for step in range(6):
            grads = [
                torch.empty_like(p).normal_(0.0, 10.0 ** (9 * step - 42), generator=generator) for p in params
            ]
            host.update_params(optimizer, 0.01 * (step + 1), step, params, grads, memory, DECAYED)
    return [tensor for row in (params, *memory.values()) for tensor in row]


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("weight_decay", [0.0, 0.013])
@pytest.mark.parametrize("name", [name for name, rule in RULES.items() if not rule.whole])
def test_every_rule_has_the_bits_of_the_operations(
    name: str, weight_decay: float, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if one_pass._library() is None:
        pytest.skip("there is no C compiler")
    monkeypatch.setattr(one_pass, "_PIECE", 1000)
    optimizer = Optimizer(name, lr=0.01, weight_decay=weight_decay)
    with threads(num_threads):
        found, expected = (updated(optimizer, in_one_pass=which) for which in (True, False))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert any(tensor.abs().min() > 0 for tensor in found)


def test_what_it_does_not_take_is_left_to_torch() -> None:
    optimizer = Optimizer("momentum")
    plain, wide = torch.ones(4, 3, 2, 2), torch.ones(5, dtype=torch.float64)
    last, gaps = plain.to(memory_format=LAST), torch.ones(4, 6)[:, ::2]
    params, grads = [plain, plain.clone(), wide, gaps], [plain * 2, last * 2, wide * 2, gaps * 2]
    memory = [torch.zeros_like(p) for p in params]
    left = one_pass.update_in_one_pass(optimizer, 0.1, 0, [params, grads, memory], [False] * 4)
    assert left == ([1, 2, 3] if one_pass._library() else [0, 1, 2, 3])
    params, memory = ([make(p) for p in params] for make in (torch.ones_like, torch.zeros_like))
    host.update_params(optimizer, 0.1, 0, params, grads, {"velocity": memory}, [False] * 4)
    assert all(torch.equal(p, torch.ones_like(p) - 2 * torch.full_like(p, 0.1)) for p in params)


def test_without_a_compiler_all_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CC", "PATH"):
        monkeypatch.setenv(name, "/nowhere")
    with pytest.raises(c_library.NoCompiler):
        c_library.find_compiler()
    one_pass._library.cache_clear()
    try:
        rows = [[torch.ones(3)], [torch.ones(3)]]
        assert one_pass.update_in_one_pass(Optimizer("sgd"), 0.1, 0, rows, [False]) == [0]
        host.update_params(Optimizer("sgd"), 0.5, 0, *rows, {}, [False])
        assert torch.equal(rows[0][0], torch.full((3,), 0.5))
        assert not one_pass.explain_update(Optimizer("sgd"), torch.nn.Linear(10, 10), CPU)
        (notice,) = one_pass.explain_update(Optimizer("sgd"), torch.nn.Linear(1000, 1000), CPU)
        assert "install gcc or clang" in notice
    finally:
        monkeypatch.undo()
        one_pass._library.cache_clear()
    assert not one_pass.explain_update(Optimizer("sgd"), torch.nn.Linear(1000, 1000), CPU)
