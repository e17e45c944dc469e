"""The update rules, written in operations that round once.

A gradient's way ends here: backward → lane tree → optimizer. Only add, subtract, multiply, divide and
square root are used, each rounded as IEEE says. So an element's new value depends on that element
alone, not on the slice, the vector width or the device it was computed with; stock fused optimizers
break this.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.spec import Optimizer

Tensors = list[Tensor] | tuple[Tensor, ...]
State = dict[str, list[Tensor]]

# What each rule remembers of a parameter.
_MEMORY = {
    "sgd": (),
    "momentum": ("velocity",),
    "nag": ("velocity",),
    "adagrad": ("square",),
    "adadelta": ("square", "delta"),
    "rmsprop": ("square",),
    "adam": ("mean", "square"),
    "adamw": ("mean", "square"),
}


def init_state(optimizer: Optimizer, params: Tensors) -> State:
    """Zeros for everything the rule remembers."""
    return {name: [torch.zeros_like(p) for p in params] for name in _MEMORY[optimizer.name]}


@torch.no_grad()
def update(
    optimizer: Optimizer, lr: float, step: int, params: list[Tensor], grads: list[Tensor], state: State
) -> None:
    """Change `params` and `state` in place; `step` counts from 0. The gradients are used up."""
    if optimizer.weight_decay:
        if optimizer.name == "adamw":
            torch._foreach_mul_(params, 1.0 - lr * optimizer.weight_decay)
        else:
            torch._foreach_add_(grads, torch._foreach_mul(params, optimizer.weight_decay))
    torch._foreach_sub_(params, torch._foreach_mul(_direction(optimizer, step, grads, state), lr))


def _direction(optimizer: Optimizer, step: int, grads: Tensors, state: State) -> Tensors:
    """What to subtract, before the learning rate."""
    options = optimizer.options
    match optimizer.name:
        case "sgd":
            return grads
        case "momentum":
            return _decay_and_add(state["velocity"], options["momentum"], grads)
        case "nag":
            velocity = _decay_and_add(state["velocity"], options["momentum"], grads)
            torch._foreach_add_(grads, torch._foreach_mul(velocity, options["momentum"]))
            return grads
        case "adagrad":
            square = _decay_and_add(state["square"], 1.0, torch._foreach_mul(grads, grads))
            return _over_root(grads, square, options["eps"])
        case "rmsprop":
            square = _average(state["square"], options["alpha"], torch._foreach_mul(grads, grads))
            return _over_root(grads, square, options["eps"])
        case "adadelta":
            return _adadelta(options["rho"], options["eps"], grads, state)
    return _adam(options["beta1"], options["beta2"], options["eps"], step, grads, state)


def _adadelta(rho: float, eps: float, grads: Tensors, state: State) -> Tensors:
    square = _average(state["square"], rho, torch._foreach_mul(grads, grads))
    torch._foreach_mul_(grads, _roots(torch._foreach_add(state["delta"], eps)))
    torch._foreach_div_(grads, _roots(torch._foreach_add(square, eps)))
    _average(state["delta"], rho, torch._foreach_mul(grads, grads))
    return grads


def _adam(beta1: float, beta2: float, eps: float, step: int, grads: Tensors, state: State) -> Tensors:
    square = _average(state["square"], beta2, torch._foreach_mul(grads, grads))
    mean = _average(state["mean"], beta1, grads)
    unbiased = _over(square, 1.0 - beta2 ** (step + 1))
    return _over_root(_over(mean, 1.0 - beta1 ** (step + 1)), unbiased, eps)


def _decay_and_add(memory: Tensors, decay: float, values: Tensors) -> Tensors:
    if decay != 1.0:
        torch._foreach_mul_(memory, decay)
    torch._foreach_add_(memory, values)
    return memory


def _average(memory: Tensors, decay: float, values: Tensors) -> Tensors:
    """memory ← decay · memory + (1 − decay) · values; `values` are used up."""
    torch._foreach_mul_(values, 1.0 - decay)
    return _decay_and_add(memory, decay, values)


def _over(values: Tensors, divisor: float) -> Tensors:
    """Quotients rounded once: a GPU multiplies by the reciprocal of a number that is no tensor."""
    by = torch.full((), divisor, dtype=values[0].dtype, device=values[0].device)
    return torch._foreach_div(values, [by] * len(values))


def _roots(values: Tensors) -> list[Tensor]:
    """Square roots rounded once: in fp64 on a CPU, where torch's own of fp32 are now and then one bit off."""
    return [value.double().sqrt().to(value.dtype) if value.is_cpu else value.sqrt() for value in values]


def _over_root(values: Tensors, square: Tensors, eps: float) -> Tensors:
    root = _roots(square)
    torch._foreach_add_(root, eps)
    torch._foreach_div_(values, root)
    return values
