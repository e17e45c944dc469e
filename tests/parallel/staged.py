"""All stages of a cut model in one process, one after another: the gradients and buffers of one lane."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lockstep.kernels.structure import leaves
from lockstep.models.tensors import buffers_kept
from lockstep.parallel.cut import Trial, try_lane
from lockstep.parallel.model_graph import ModelGraph
from lockstep.parallel.stage import Stage


def trace(model: nn.Module, images: Tensor, cost: str = "counted") -> tuple[ModelGraph, Trial]:
    """The graph of a model, and a lane through it."""
    with buffers_kept(model), torch.random.fork_rng():
        graph = ModelGraph(model)
        return graph, try_lane(graph, images, cost, keeps_shared=False)


def square(outputs: Any) -> Tensor:
    """A loss for outputs of any structure."""
    return torch.stack([part.float().square().mean() for part in leaves(outputs)]).sum()


def uncut(model: nn.Module, images: Tensor) -> dict[str, Tensor]:
    """Loss, gradients and new buffers of the whole model; its buffers stay as they were."""
    torch.manual_seed(5)
    with buffers_kept(model):
        loss = square(model(images))
        params = {name: p for name, p in model.named_parameters() if p.requires_grad}
        grads = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
        return _named(loss, dict(zip(params, grads, strict=True)), model)


def cut(
    model: nn.Module, images: Tensor, graph: ModelGraph, trial: Trial, cuts: list[int]
) -> dict[str, Tensor]:
    """The same by stages; what goes from one to the next is copied, as between processes."""
    torch.manual_seed(5)
    stages = [Stage(graph, trial, cuts, number) for number in range(len(cuts) + 1)]
    with buffers_kept(model):
        passed, given = [], [images]
        for stage in stages:
            passed.append(stage.forward(given))
            given = [tensor.detach().clone(memory_format=torch.preserve_format) for tensor in passed[-1].sent]
        loss = square(passed[-1].result)
        outputs, back, found = [loss], None, {}
        for number in reversed(range(len(stages))):
            names = [n for n, p in model.named_parameters() if p.requires_grad and n in stages[number].names]
            params = [model.get_parameter(name) for name in names]
            inputs = [tensor for tensor in passed[number].received if tensor.requires_grad]
            grads = torch.autograd.grad(outputs, [*params, *inputs], back, allow_unused=True)
            found |= dict(zip(names, grads, strict=False))
            if number:
                sent = [tensor for tensor in passed[number - 1].sent if tensor.requires_grad]
                pairs = [(t, g) for t, g in zip(sent, grads[len(names) :], strict=True) if g is not None]
                outputs, back = [t for t, _ in pairs], [g for _, g in pairs]
        return _named(loss, found, model)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether all bits are equal."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def _named(loss: Tensor, grads: dict[str, Tensor | None], model: nn.Module) -> dict[str, Tensor]:
    found = {f"grad {name}": grad for name, grad in grads.items() if grad is not None}
    return {"loss": loss.detach(), **found, **{n: b.clone() for n, b in model.named_buffers()}}
