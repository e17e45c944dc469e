"""Blocks of a model that keep only their input: the backward pass computes each again, with the same bits.

A block is a member of an `nn.Sequential` that has parts of its own, such as a residual block; of a plain
chain of layers, as many neighbours as its square root. Dropout is keyed and torch's streams are set back, so
a block gives the same again; buffers are those that the lane began with, so nothing is counted twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, is_grad_enabled, nn
from torch.utils.checkpoint import checkpoint

from lockstep.errors import ModelError

_Forward = Callable[..., Any]
_FEWEST = 4  # layers of a chain that is worth it


class RecomputedBlocks:
    """Replaces the forward of a model's blocks, until `release`."""

    def __init__(self, model: nn.Module) -> None:
        names = {module: name for name, module in model.named_modules()}
        blocks = list(dict.fromkeys(_members(model)))
        chains = [] if blocks else [chain for chain in model.modules() if _is_long(chain)]
        if not blocks and not chains:
            raise ModelError(
                "train.recompute=true: the model has no nn.Sequential, whose members are the blocks that are "
                "computed again: put its blocks into one, or set train.recompute=false"
            )
        self._replaced = [*blocks, *chains]
        self._before = [vars(module).get("forward") for module in self._replaced]
        for block in blocks:
            block.forward = _again(names[block], block, block.forward)
        for chain in chains:
            chain.forward = _in_parts(names[chain], chain)

    def release(self) -> None:
        """Give the blocks their own forward back."""
        for module, before in zip(self._replaced, self._before, strict=True):
            if before is None:
                vars(module).pop("forward", None)
            else:
                module.forward = before


@contextmanager
def buffers_of(slots: Sequence[tuple[dict[str, Any], str]], values: Sequence[Tensor]) -> Iterator[None]:
    """Let modules have other tensors as their buffers, for a while; what becomes of these is forgotten."""
    own = [table[key] for table, key in slots]
    try:
        for (table, key), value in zip(slots, values, strict=True):
            table[key] = value
        yield
    finally:
        for (table, key), tensor in zip(slots, own, strict=True):
            table[key] = tensor


def _members(module: nn.Module) -> Iterator[nn.Module]:
    """The blocks within a module: members with parts of their own, the innermost ones."""
    for child in module.children():
        inner = list(_members(child))
        if inner:
            yield from inner
        elif _is_chain(module) and any(child.children()):
            yield child


def _is_chain(module: nn.Module) -> bool:
    return type(module).forward is nn.Sequential.forward


def _is_long(module: nn.Module) -> bool:
    return _is_chain(module) and len(list(module.children())) >= _FEWEST


def _in_parts(name: str, chain: nn.Module) -> _Forward:
    """A forward of a chain of layers, cut into parts; none begins with a layer that works in place."""
    layers = list(chain.children())
    length = math.ceil(math.sqrt(len(layers)))
    cuts = [n for n in range(0, len(layers), length) if not n or not getattr(layers[n], "inplace", False)]
    parts = [
        _again(name, chain, partial(_apply, layers[start:stop]))
        for start, stop in zip(cuts, [*cuts[1:], len(layers)], strict=True)
    ]
    return partial(_apply, parts)


def _apply(functions: Sequence[_Forward], x: Any) -> Any:
    for function in functions:
        x = function(x)
    return x


def _again(name: str, block: nn.Module, forward: _Forward) -> _Forward:
    """A forward whose intermediate values are computed again in the backward pass."""

    def recomputed(*args: Any, **options: Any) -> Any:
        if not (block.training and is_grad_enabled()):
            return forward(*args, **options)
        given = [value for value in (*args, *options.values()) if isinstance(value, Tensor)]
        versions = [tensor._version for tensor in given]
        found = checkpoint(forward, *args, use_reentrant=False, **options)
        if versions != [tensor._version for tensor in given]:
            raise ModelError(
                f"train.recompute=true: '{name}' changes its input in place, so it cannot be computed again: "
                "let its first layer not work in place (inplace=False), or set train.recompute=false"
            )
        return found

    return recomputed
