"""Notices what modules keep outside of their parameters and buffers: every worker has its own of it."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

_PLAIN = (bool, int, float, str)
_OWN = ("training", "_parameters", "_buffers", "_modules")  # attributes of nn.Module itself


class HiddenState:
    """Compares the plain attributes of modules after each lane.

    What changes between the first lane and the second is filled once, as a cache is. What changes again is
    state that no checkpoint has, and that is another one in every worker.
    """

    def __init__(self, modules: Mapping[str, nn.Module], tensors: bool = True) -> None:
        """Without `tensors` only numbers count: many modules keep their last outputs, and do no harm."""
        self._modules, self._tensors = modules, tensors
        self.looks, self._seen = 0, self._find()

    def look(self) -> list[str]:
        """What has changed since the last look, from the second lane on: a sentence for each attribute."""
        now, before = self._find(), self._seen
        self._seen, self.looks = now, self.looks + 1
        if self.looks == 1:
            return []
        changed = [key for key, value in now.items() if key in before and before[key] != value]
        return [
            f"{name} ({kind}) changes its attribute '{key}' in every lane, which is no buffer"
            for name, kind, key in changed
        ]

    def _find(self) -> dict[tuple[str, str, str], object]:
        found = dict(_attributes(self._modules))
        return {key: form for key, form in found.items() if self._tensors or isinstance(form, _PLAIN)}


def own_generators(name: str, thing: Any) -> list[str]:
    """A sentence for each random generator of its own that a module or a data set holds."""
    parts = thing.named_modules() if isinstance(thing, nn.Module) else [("", thing)]
    return [
        f"{'.'.join(filter(None, (name, path)))} ({type(part).__name__}) holds a generator of its own, "
        f"'{key}', which every worker advances by itself: draw from torch's, Python's or NumPy's global one, "
        "which are seeded for each sample and lane"
        for path, part in parts
        for key, value in getattr(part, "__dict__", {}).items()
        if isinstance(value, _generators())
    ]


def _generators() -> tuple[type, ...]:
    found: tuple[type, ...] = (torch.Generator, random.Random)
    numpy = sys.modules.get("numpy")
    return (*found, numpy.random.Generator, numpy.random.RandomState) if numpy else found


def _attributes(modules: Mapping[str, nn.Module]) -> Iterator[tuple[tuple[str, str, str], object]]:
    """Plain attributes by (module, class, name), in a form that can be compared."""
    for name, module in modules.items():
        for path, part in module.named_modules():
            place = ".".join(filter(None, (name, path)))
            for key, value in vars(part).items():
                if key not in _OWN and not key.startswith("__"):
                    form = _form(value)
                    if form is not None:
                        yield (place, type(part).__name__, key), form


def _form(value: Any) -> object:
    if isinstance(value, Tensor):
        return "tensor", value.data_ptr(), value._version
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, list | tuple):
        return type(value).__name__, *map(_form, value)
    return len(value) if isinstance(value, dict | set) else None
