"""Shuffles an epoch: the sample id at each position, as a pure function of seed, epoch and position.

Data pipeline: store → order → augment → loader. The permutation is a Feistel network over the next power of
four; it is applied again until the result is below the number of samples (cycle walking). So no worker keeps
a shuffled list, and the cursor of a run is two integers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lockstep.kernels import random

_ROUNDS = 6
_WINDOW = 16  # blocks that are read at about the same time


def sample_ids(
    seed: int, epoch: int, positions: Tensor, length: int, block: int = 0, repeats: int = 1
) -> Tensor:
    """The sample id at each position of `epoch`, for a set of `length` samples.

    With `block`, samples are shuffled by blocks of so many neighbours, and then within windows of blocks.
    With `repeats`, so many neighbouring positions have the same sample; the r-th has the number
    id + r · length, by which augmentation draws.
    """
    turns, positions = positions % repeats, positions // repeats
    return _shuffled_ids(seed, epoch, positions, length, block) + turns * length


def _shuffled_ids(seed: int, epoch: int, positions: Tensor, length: int, block: int) -> Tensor:
    keys, block = order_keys(seed, epoch), min(block, length)
    if not block:
        return _shuffle(positions, length, keys)
    ids = _shuffle_blocks(positions, length, block, keys)
    while len(outside := torch.nonzero(ids >= length).flatten()):  # the last block may be short
        ids[outside] = _shuffle_blocks(ids[outside], length, block, keys)
    return ids


def _shuffle(
    positions: Tensor, length: int | Tensor, keys: list[int] | list[Tensor], most: int = 0
) -> Tensor:
    """A permutation of 0 to `length` - 1, at some positions; each may have a length, up to `most`."""
    half_bits = half_width(most or int(length))
    ids = _permute(positions, half_bits, keys)
    outside = torch.nonzero(ids >= length).flatten()
    while len(outside):  # cycle walking: apply the permutation again until it lands inside
        some: Any = [key[outside] if isinstance(key, Tensor) else key for key in keys]
        ids[outside] = _permute(ids[outside], half_bits, some)
        lengths = length[outside] if isinstance(length, Tensor) else length
        outside = outside[ids[outside] >= lengths]
    return ids


def _shuffle_blocks(positions: Tensor, length: int, block: int, keys: list[int]) -> Tensor:
    """The same by blocks: a permutation of whole blocks, of which the last may reach past the end."""
    blocks = -(-length // block)
    window = min(_WINDOW, blocks) * block
    number = positions // window
    size = (blocks * block - number * window).clamp(max=window)  # the last window may be short
    of_window = [random.bits(key, number) for key in keys]
    slot = number * window + _shuffle(positions % window, size, of_window, window)
    return _shuffle(slot // block, blocks, keys) * block + slot % block


def half_width(length: int) -> int:
    """Bits in each half of the Feistel network, for `length` samples."""
    return max((max(length - 1, 1).bit_length() + 1) // 2, 1)


def order_keys(seed: int, epoch: int) -> list[int]:
    """The round keys of an epoch's permutation."""
    return [random.key("order", seed, epoch, turn) for turn in range(_ROUNDS)]


def _permute(x: Tensor, half_bits: int, keys: list[int] | list[Tensor]) -> Tensor:
    mask = (1 << half_bits) - 1
    left, right = x >> half_bits, x & mask
    for key in keys:
        left, right = right, left ^ (random.bits(key, right) & mask)
    return (left << half_bits) | right


def lane_positions(step_in_epoch: int, batch: int, lanes: int) -> Tensor:
    """The positions of a step as [lane, sample]: sample j of the batch is in lane j mod `lanes`."""
    first = step_in_epoch * batch
    return torch.arange(first, first + batch).view(batch // lanes, lanes).t()
