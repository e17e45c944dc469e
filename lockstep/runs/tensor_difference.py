"""For `compare.py`: finds which tensors of two checkpoints differ, and the first element that does."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# The bits of infinity, for each type whose distances are counted in ULPs. A larger magnitude is a NaN.
_INFINITY = {
    torch.float64: 0x7FF0_0000_0000_0000,
    torch.float32: 0x7F80_0000,
    torch.float16: 0x7C00,
    torch.bfloat16: 0x7F80,
}
# the order of the state; tensors of one group are sorted by name
_GROUPS = ("model", "ema", "optimizer", "feedback")


@dataclass(frozen=True)
class Element:
    """The first element of a tensor that differs; values by `repr`, bits in hex."""

    index: tuple[int, ...]
    values: tuple[str, str]
    bits: tuple[str, str]
    ulps: int | None  # for floating types; None if either is a NaN
    difference: int | None  # for integers: B − A


@dataclass(frozen=True)
class Located:
    """The tensors that differ between two checkpoints of one step, and the details of one of them."""

    step: int
    names: list[str]  # all that differ, in the state's order
    num_tensors: int
    name: str = ""
    forms: tuple[str | None, str | None] = (None, None)  # dtype and shape in A and B; None if absent
    num_elements: int = 0
    num_different: int = 0
    element: Element | None = None  # None if the forms differ


def locate(step: int, a: Mapping[str, Tensor], b: Mapping[str, Tensor], wanted: str = "") -> Located:
    """Find the tensors that differ, and the first different element of `wanted` or else of the first one."""
    names = in_order(name for name in a.keys() | b.keys() if not _same_bits(a.get(name), b.get(name)))
    num_tensors = len(a.keys() | b.keys())
    if not names:
        return Located(step, names, num_tensors)
    name = wanted if wanted in names else names[0]
    left, right = a.get(name), b.get(name)
    forms = _form(left), _form(right)
    if left is None or right is None or forms[0] != forms[1]:
        return Located(step, names, num_tensors, name, forms)
    different = (_bytes(left) != _bytes(right)).any(1).nonzero().flatten()
    element = _element(left, right, int(different[0]))
    return Located(step, names, num_tensors, name, forms, left.numel(), different.numel(), element)


def ulp_distance(a: Tensor, b: Tensor) -> int | None:
    """The distance between two scalars in ULPs, steps from one float to the next; None for a NaN.

    Zero and minus zero are 0 apart; infinity is 1 beyond the largest number.
    """
    infinity = _INFINITY.get(a.dtype)
    if infinity is None:
        return None
    sign = 1 << (8 * a.dtype.itemsize - 1)
    places = [-(bits & ~sign) if bits & sign else bits for bits in (_bits(a), _bits(b))]
    return None if max(map(abs, places)) > infinity else abs(places[0] - places[1])


def in_order(names: Iterable[str]) -> list[str]:
    """Sort the names of a state's tensors into the state's order."""

    def place(name: str) -> tuple[int, str]:
        group = name.partition(".")[0]
        return _GROUPS.index(group) if group in _GROUPS else len(_GROUPS), name

    return sorted(names, key=place)


def _form(tensor: Tensor | None) -> str | None:
    return None if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _bytes(tensor: Tensor) -> Tensor:
    """One row of bytes per element: compared as numbers, NaN differs from itself, and 0 equals minus 0."""
    return tensor.contiguous().flatten().view(torch.uint8).reshape(tensor.numel(), tensor.dtype.itemsize)


def _same_bits(a: Tensor | None, b: Tensor | None) -> bool:
    return (
        a is not None and b is not None and _form(a) == _form(b) and bool(torch.equal(_bytes(a), _bytes(b)))
    )


def _bits(scalar: Tensor) -> int:
    return int.from_bytes(_bytes(scalar).numpy().tobytes(), sys.byteorder)


def _element(a: Tensor, b: Tensor, place: int) -> Element:
    left, right = a.flatten()[place], b.flatten()[place]
    index = tuple(int(i) for i in np.unravel_index(place, a.shape))
    digits = 2 * a.dtype.itemsize
    floating = a.dtype.is_floating_point or a.dtype.is_complex
    return Element(
        index,
        (repr(left.item()), repr(right.item())),
        (f"0x{_bits(left):0{digits}x}", f"0x{_bits(right):0{digits}x}"),
        ulp_distance(left, right),
        None if floating else int(right.item()) - int(left.item()),
    )
