"""Hashes the source of a user's own module or loss function, for the run's identity.

A description changes when the source, the structure, a plain attribute or the computed values change.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lockstep.kernels import random
from lockstep.kernels.loss import Loss


def describe_module(model: nn.Module) -> dict[str, str]:
    """The class, and a hash over structure, parameters, plain attributes and the sources of all classes."""
    lines = [repr(model)]
    lines += [f"{k} {tuple(t.shape)} {t.dtype}" for k, t in model.state_dict().items()]
    lines += [f"{name} {p.requires_grad}" for name, p in model.named_parameters()]
    for name, module in model.named_modules():
        plain = {k: v for k, v in vars(module).items() if isinstance(v, (bool, int, float, str))}
        plain.pop("training", None)
        lines.append(f"{name} {sorted(plain.items())}")
    lines += sorted({describe_callable(type(module)) for module in model.modules()})
    return {"class": describe_callable(type(model)), "sha256": _sha256("\n".join(lines))}


def describe_loss(loss: Loss, num_classes: int) -> str:
    """A loss's name, and hashes of its source and of its results, since a closure may hold values."""
    counter = torch.arange(8 * num_classes)
    logits = (random.uniform(random.key("loss"), counter) * 6 - 3).view(8, num_classes).requires_grad_()
    torch.manual_seed(0)  # for a loss that draws random numbers
    try:
        value = loss(logits, torch.arange(8) % num_classes)
        (grad,) = torch.autograd.grad(value, logits)
        values = [value.tolist(), grad.tolist()]
    except Exception:  # the loss fails again, with an error for the user, when a lane is tried
        return describe_callable(loss)
    return f"{describe_callable(loss)} {_sha256(repr(values))}"


def describe_callable(function: Callable[..., Any]) -> str:
    """A name for a user's function or class that changes when its source does."""
    name = (
        f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', type(function).__name__)}"
    )
    try:
        source = inspect.getsource(function if hasattr(function, "__qualname__") else type(function))
    except (OSError, TypeError):
        return name
    return f"{name} {_sha256(source)}"


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
