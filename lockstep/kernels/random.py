"""Keyed random bits: a pure function of a key and a counter, without the state of a generator.

Order, augmentation, dropout and the procedural data all draw from here. So the random values of a sample
depend on its keys alone: not on the worker, the batch, the device or earlier draws.

Integers are int64 tensors. Their arithmetic wraps around, in the same way on every device.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


def key(*parts: int | str) -> int:
    """Fold integers and names into one int64 key; different parts give unrelated keys."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)


def bits(base: int | Tensor, counter: Tensor) -> Tensor:
    """64 random bits for each element of an int64 `counter` under the key `base` (splitmix64)."""
    x = (counter + 1) * _GOLDEN + base
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def integers(base: int, counter: Tensor, bound: int) -> Tensor:
    """Integers in [0, bound) for each counter; `bound` is far below 2³¹, so the bias is below 2⁻³¹."""
    return _shift_right(bits(base, counter), 2) % bound


def uniform(base: int | Tensor, counter: Tensor) -> Tensor:
    """Floats in [0, 1) with 24 random bits, exact in fp32."""
    return _shift_right(bits(base, counter), 40).to(torch.float32) * (1.0 / (1 << 24))


def symmetric(base: int, counter: Tensor) -> Tensor:
    """Floats in [−1, 1), exact in fp32: the fixed values of probes."""
    return uniform(base, counter).mul_(2).sub_(1)


def _shift_right(x: Tensor, by: int) -> Tensor:
    """Logical shift: int64's own shift would copy the sign bit."""
    return (x >> by) & ((1 << (64 - by)) - 1)
