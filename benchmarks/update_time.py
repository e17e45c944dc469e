"""Milliseconds of an update of AlexNet's weights on one CPU core: in one pass, by operations, by torch.optim.

python benchmarks/update_time.py

All take turns, so that a machine that slows down slows all of them. torch.optim is as it comes, one parameter
after another, and its fastest variant, whose bits depend on how tensors are cut.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from typing import Any

import torch
from measure import make_parser, make_record

from lockstep.kernels import one_pass_update
from lockstep.kernels.numerics import plain_torch
from lockstep.models import build_model
from lockstep.spec import Model, Optimizer, Run
from lockstep.spec.record import write_records
from lockstep.spec.rule.optimizer_rule import RULES

PEERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "momentum": lambda params, **how: torch.optim.SGD(params, lr=1e-4, momentum=0.9, **how),
    "nag": lambda params, **how: torch.optim.SGD(params, lr=1e-4, momentum=0.9, nesterov=True, **how),
    "adam": lambda params, **how: torch.optim.Adam(params, lr=1e-4, **how),
    "adamw": lambda params, **how: torch.optim.AdamW(params, lr=1e-4, weight_decay=0.0, **how),
}
VARIANTS = {"default": {}, "foreach": {"foreach": True}, "fused": {"fused": True}}


def main() -> None:
    parser = make_parser(__doc__, "update-cpu.json")
    parser.add_argument("--model", default="alexnet")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = build_model(Run(model=Model(options.model)), (3, 224, 224), 1000)
    params = [p.detach() for p in model.parameters()]
    grads = [1e-3 * torch.randn_like(p) for p in params]
    records = []
    for name, peer in PEERS.items():
        ways: dict[str, Callable[[], object]] = {
            "one pass": ours(name, params, grads),
            "operations": by_operations(ours(name, params, grads)),
            **{f"torch.optim, {each}": stock(peer, params, grads, how) for each, how in VARIANTS.items()},
        }
        found = take_turns(ways, options.rounds)
        best = min((way for way in found if way.startswith("torch")), key=lambda way: min(found[way]))
        for way, times in found.items():
            records.append(make_record(f"{options.model}, {name}: update by {way}", times, "ms"))
        for way in ("torch.optim, default", best):
            ratios = [theirs / own for own, theirs in zip(found["one pass"], found[way], strict=True)]
            records.append(make_record(f"{options.model}, {name}: {way} over one pass", ratios, "x"))
    for record in records:
        print(f"{record.name}: {record.value:.2f} {record.unit} {record.spread}")
    write_records(options.output, records)


def ours(name: str, params: list[torch.Tensor], grads: list[torch.Tensor]) -> Callable[[], object]:
    update = importlib.import_module("lockstep.train.optimizer").update_params
    mine = [p.clone() for p in params]
    memory = {key: [torch.zeros_like(p) for p in params] for key in RULES[name].memory}
    return lambda: update(Optimizer(name), 1e-4, 0, mine, grads, memory)


def by_operations(update: Callable[[], object]) -> Callable[[], object]:
    """As on a machine without a compiler."""

    def run() -> None:
        library, one_pass_update._library = one_pass_update._library, lambda: None
        try:
            update()
        finally:
            one_pass_update._library = library

    return run


def stock(peer: Any, params: list[torch.Tensor], grads: list[torch.Tensor], how: Any) -> Callable[[], object]:
    theirs = [p.clone().requires_grad_() for p in params]
    for mine, grad in zip(theirs, grads, strict=True):
        mine.grad = grad.clone()
    optimizer = peer(theirs, **how)

    def run() -> None:
        with plain_torch():
            optimizer.step()

    return run


def take_turns(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each, the first time left out."""
    found: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(rounds + 1):
        for way, work in ways.items():
            start = time.perf_counter()
            work()
            if number:
                found[way].append(1000 * (time.perf_counter() - start))
    return found


if __name__ == "__main__":
    main()
