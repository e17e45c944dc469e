"""Shuffles an epoch: the sample id at each position, as a pure function of seed, epoch and position.

Data pipeline: store → order → augment → loader. The permutation is a Feistel network over the next power of
four; it is applied again until the result is below the number of samples (cycle walking). So no worker keeps
a shuffled list, and the cursor of a run is two integers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.kernels import random

_ROUNDS = 6


def sample_ids(seed: int, epoch: int, positions: Tensor, length: int) -> Tensor:
    """The sample id at each position of `epoch`, for a set of `length` samples."""
    half_bits, keys = half_width(length), order_keys(seed, epoch)
    ids = _permute(positions, half_bits, keys)
    outside = torch.nonzero(ids >= length).flatten()
    while len(outside):  # cycle walking: apply the permutation again until it lands inside
        ids[outside] = _permute(ids[outside], half_bits, keys)
        outside = outside[ids[outside] >= length]
    return ids


def half_width(length: int) -> int:
    """Bits in each half of the Feistel network, for `length` samples."""
    return max((max(length - 1, 1).bit_length() + 1) // 2, 1)


def order_keys(seed: int, epoch: int) -> list[int]:
    """The round keys of an epoch's permutation."""
    return [random.key("order", seed, epoch, turn) for turn in range(_ROUNDS)]


def _permute(x: Tensor, half_bits: int, keys: list[int]) -> Tensor:
    mask = (1 << half_bits) - 1
    left, right = x >> half_bits, x & mask
    for key in keys:
        left, right = right, left ^ (random.bits(key, right) & mask)
    return (left << half_bits) | right


def lane_positions(step_in_epoch: int, batch: int, lanes: int) -> Tensor:
    """The positions of a step as [lane, sample]: sample j of the batch is in lane j mod `lanes`."""
    first = step_in_epoch * batch
    return torch.arange(first, first + batch).view(batch // lanes, lanes).t()
