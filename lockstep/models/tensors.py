"""A model's tensors by name, and their SHA-256.

Tensors on torch's `meta` device are not this worker's: it keeps a part of the model only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, also buffers that a state_dict leaves out, since they may change."""
    every = {**model.state_dict(), **{name: buffer.detach() for name, buffer in model.named_buffers()}}
    return {name: tensor for name, tensor in every.items() if not _is_elsewhere(tensor)}


def trainable(model: nn.Module) -> list[str]:
    """Names of the parameters that are trained, in the model's order."""
    return [name for name, p in model.named_parameters() if p.requires_grad and not p.is_meta]


def parameter_aliases(model: nn.Module) -> dict[str, str]:
    """Other names of parameters that several modules share, and the first name of each."""
    first = {id(p): name for name, p in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: first[id(p)] for name, p in every if first[id(p)] != name}


def float_state(model: nn.Module, copy: bool = False) -> dict[str, Tensor]:
    """Parameters and floating buffers by name: the tensors that weight averaging averages."""
    every = {name: tensor for name, tensor in model.state_dict().items() if not _is_elsewhere(tensor)}
    items = {name: tensor.detach() for name, tensor in every.items() if tensor.is_floating_point()}
    return {name: tensor.clone() if copy else tensor for name, tensor in items.items()}


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Run the block, then give the model the buffers that it had before.

    A module may count its calls or take statistics in eval mode too. Each worker evaluates other images, so
    its buffers would differ from those of the others.
    """
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                if name in before:
                    buffer.copy_(before[name])


@torch.no_grad()
def replace_tensors(model: nn.Module, choose: Callable[[str, Tensor], Tensor | None]) -> None:
    """Put other tensors in the place of parameters and buffers, where `choose(name, tensor)` gives one.

    What was shared by several modules is shared again.
    """
    made: dict[int, Tensor] = {}  # by the tensor that was there
    for path, module in model.named_modules():
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for table in tables:
            for key, tensor in table.items():
                new = None if tensor is None else choose(f"{path}.{key}" if path else key, tensor)
                if new is not None:
                    is_parameter = isinstance(tensor, nn.Parameter)
                    new = nn.Parameter(new, tensor.requires_grad) if is_parameter else new
                    table[key] = made.setdefault(id(tensor), new)


def copy_part(model: nn.Module, has: Callable[[str], bool]) -> nn.Module:
    """A copy of a part of a model, the rest of which is on `meta`; what has no memory gets none."""
    made: dict[int, Tensor] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not has(name) or not has_values(tensor):
            new = tensor.detach() if has(name) else torch.empty_like(tensor, device="meta")
            is_parameter = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(new, tensor.requires_grad) if is_parameter else new
    return deepcopy(model, made)


def has_values(tensor: Tensor) -> bool:
    """Whether a tensor has memory for its elements: not on `meta`, and not one element for all of them."""
    return not tensor.is_meta and (tensor.numel() < 2 or any(tensor.stride()))


def _is_elsewhere(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_meta


class TensorHash:
    """SHA-256 over (name, dtype, shape, bytes) of tensors, one after another; bytes in logical order."""

    def __init__(self) -> None:
        self._sha, self.count = hashlib.sha256(), 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Take the next tensor."""
        tensor = tensor.detach().cpu().contiguous()
        dtype = str(tensor.dtype).removeprefix("torch.")
        self._sha.update(f"{name}\0{dtype}\0{tuple(tensor.shape)}\0".encode())
        self._sha.update(tensor.flatten().view(torch.uint8).numpy().data)
        self.count += 1

    def hexdigest(self) -> str:
        """The hash of all tensors so far."""
        return self._sha.hexdigest()


def tensors_sha256(tensors: Mapping[str, Tensor]) -> str:
    """The SHA-256 of tensors in the order of their names."""
    found = TensorHash()
    for name in sorted(tensors):
        found.add(name, tensors[name])
    return found.hexdigest()


def buffer_slots(model: nn.Module, floating: bool) -> dict[str, tuple[dict[str, Any], str]]:
    """The dictionary and key of each buffer, not the tensor itself, which a module may replace."""
    return {
        name: (model.get_submodule(name.rpartition(".")[0])._buffers, name.rpartition(".")[2])
        for name, buffer in model.named_buffers()
        if buffer.is_floating_point() == floating and not buffer.is_meta
    }
