"""The order of an epoch computed on the device: the order of `data/order.py`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.triton.keyed_bits import device_bits

_BLOCK = 256


@triton.jit
def _permute(x, keys, HALF: tl.constexpr, ROUNDS: tl.constexpr):
    mask = (1 << HALF) - 1
    left, right = x >> HALF, x & mask
    for turn in tl.static_range(ROUNDS):
        drawn = device_bits(tl.load(keys + turn), right).to(tl.int64) & mask
        left, right = right, left ^ drawn
    return (left << HALF) | right


@triton.jit
def _order(
    positions, keys, out, count, length, HALF: tl.constexpr, ROUNDS: tl.constexpr, BLOCK: tl.constexpr
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ids = _permute(tl.load(positions + i, mask=i < count, other=0), keys, HALF, ROUNDS)
    while tl.max((ids >= length).to(tl.int32)) > 0:  # cycle walking
        ids = tl.where(ids >= length, _permute(ids, keys, HALF, ROUNDS), ids)
    tl.store(out + i, ids, mask=i < count)


def order(positions: Tensor, keys: Tensor, out: Tensor, length: int, half_bits: int) -> None:
    """The sample at each of the `positions`, for a set of `length` samples and the `keys` of an epoch."""
    count = positions.numel()
    _order[(triton.cdiv(count, _BLOCK),)](
        positions, keys, out, count, length, HALF=half_bits, ROUNDS=len(keys), BLOCK=_BLOCK
    )
