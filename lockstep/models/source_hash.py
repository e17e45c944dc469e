"""Hashes the source of a user's own module or loss function, for the run's identity.

A description changes when the source, the structure, a plain attribute or the computed values change.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
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
    lines += sorted({describe_callable(kind) for kind in {type(module) for module in model.modules()}})
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


def describe_values(thing: Any, depth: int = 6) -> str:
    """A hash of what a function or object holds: closure, defaults, attributes; else its type."""
    return _sha256(_tell_values(thing, depth))


def _tell_values(thing: Any, depth: int) -> str:
    if isinstance(thing, (bool, int, float, complex, str, bytes, type(None))):
        return repr(thing)
    if isinstance(thing, torch.Tensor):
        thing = thing.detach().cpu().contiguous().view(torch.uint8).numpy() if thing.numel() else None
    if isinstance(thing, np.ndarray) and thing.dtype != object:
        return f"{thing.dtype} {thing.shape} {hashlib.sha256(np.ascontiguousarray(thing).data).hexdigest()}"
    if not depth:
        return type(thing).__qualname__
    if isinstance(thing, Mapping):
        parts = [f"{_tell_values(k, depth - 1)}: {_tell_values(v, depth - 1)}" for k, v in thing.items()]
    elif isinstance(thing, (list, tuple)):
        parts = [_tell_values(part, depth - 1) for part in thing]
    elif isinstance(thing, functools.partial):
        parts = [_tell_values(part, depth) for part in (thing.func, thing.args, thing.keywords)]
    elif inspect.isfunction(thing):
        closed = inspect.getclosurevars(thing)
        held = (thing.__defaults__, thing.__kwdefaults__, dict(closed.nonlocals), dict(closed.globals))
        parts = [describe_callable(thing), *(_tell_values(part, depth - 1) for part in held)]
    elif inspect.ismethod(thing):
        parts = [_tell_values(part, depth) for part in (thing.__func__, thing.__self__)]
    elif isinstance(thing, (type, types.ModuleType)):
        parts = [thing.__name__]
    else:
        parts = [_tell_values(getattr(thing, "__dict__", None), depth - 1)]
    return f"{type(thing).__qualname__}({', '.join(parts)})"


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
