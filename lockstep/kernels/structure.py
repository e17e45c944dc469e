"""Structures of tensors: dicts, lists and tuples of them, as models give them and data sets hold them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """The same structure with `function` of every tensor; what is no tensor stays as it is."""
    return zip_tensors(lambda tensors: function(tensors[0]), [value])


def zip_tensors(function: Callable[[list[Tensor]], Any], values: Sequence[Any]) -> Any:
    """One structure of several alike: `function` of the tensors that stand in the same place."""
    first = values[0]
    if isinstance(first, Tensor):
        return function(list(values))
    if isinstance(first, dict):
        return type(first)({key: zip_tensors(function, [value[key] for value in values]) for key in first})
    if isinstance(first, list | tuple):
        parts = [zip_tensors(function, part) for part in zip(*values, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    return first


def place(value: Any, device: torch.device) -> Any:
    """The same structure on a device."""
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), value)


def first(value: Any, count: int) -> Any:
    """The same structure with the first `count` rows of every tensor."""
    return map_tensors(lambda tensor: tensor[:count], value)


def leaves(value: Any) -> list[Tensor]:
    """The tensors of a structure, in order."""
    found: list[Tensor] = []
    map_tensors(found.append, value)
    return found


def as_float(value: Any) -> Any:
    """The same structure with floating tensors in fp32."""
    return map_tensors(lambda tensor: tensor.float() if tensor.is_floating_point() else tensor, value)


def describe(value: Any) -> str:
    """Types and shapes of a structure, in a few words."""
    if isinstance(value, Tensor):
        return describe_tensor(value.dtype, value.shape)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {describe(part)}" for key, part in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "(" + ", ".join(map(describe, value)) + ")"
    return type(value).__name__


def describe_tensor(dtype: torch.dtype, shape: Sequence[int]) -> str:
    """A type and a shape in a few words."""
    return f"{str(dtype).removeprefix('torch.')} {'x'.join(map(str, shape)) or 'number'}"
