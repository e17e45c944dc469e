"""Shuffles an epoch: the sample id at each position, as a pure function of seed, epoch and position.

Data pipeline: store → order → augment → loader. The permutation is a Feistel network over the next power of
four; it is applied again until the result is below the number of samples (cycle walking). So no worker keeps
a shuffled list, and the cursor of a run is two integers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
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


@dataclass(frozen=True)
class ClassOrder:
    """`data.order=balanced`: every class is as often in an epoch as any other, and so in a batch, nearly.

    The positions of an epoch are cut into rows with each class once, in an order of the row's own. A class
    goes through all of its samples, in an order of the round's own, before one comes again, from an epoch
    into the next. So which sample stands where is a function of (seed, epoch, position) and the labels.
    """

    seed: int
    labels: Tensor  # of the training split

    def ids(self, epoch: int, positions: Tensor) -> Tensor:
        """The sample id at each position, as `sample_ids`: the r-th time in an epoch plus r · length."""
        length, classes = len(self.labels), len(self._sizes)
        rows, slots = positions // classes, positions % classes
        of_row = [random.bits(key, rows) for key in order_keys(self.seed, epoch, "rows")]
        number = _shuffle(slots, classes, of_row, half_width(classes))
        size, before = self._sizes[number], epoch * -(-length // classes)
        drawn = before + rows  # how often the class was drawn so far
        turn = drawn // size
        of_turn = [random.bits(random.bits(key, number), turn) for key in order_keys(self.seed, 0, "turns")]
        place = _shuffle(drawn % size, size, of_turn, self._halves[number])
        return self._members[self._starts[number] + place] + (turn - before // size) * length

    @cached_property
    def _members(self) -> Tensor:
        """The samples of each class, one class after another."""
        return self.labels.sort(stable=True).indices

    @cached_property
    def _sizes(self) -> Tensor:
        """How many samples each class has, of those that have any."""
        counts = torch.bincount(self.labels)
        return counts[counts > 0]

    @cached_property
    def _starts(self) -> Tensor:
        return self._sizes.cumsum(0) - self._sizes

    @cached_property
    def _halves(self) -> Tensor:
        return torch.tensor([half_width(size) for size in self._sizes.tolist()])


def _shuffled_ids(seed: int, epoch: int, positions: Tensor, length: int, block: int) -> Tensor:
    keys, block = order_keys(seed, epoch), min(block, length)
    if not block:
        return _shuffle(positions, length, keys, half_width(length))
    ids = _shuffle_blocks(positions, length, block, keys)
    while len(outside := torch.nonzero(ids >= length).flatten()):  # the last block may be short
        ids[outside] = _shuffle_blocks(ids[outside], length, block, keys)
    return ids


def _shuffle(
    positions: Tensor, length: int | Tensor, keys: list[int] | list[Tensor], half_bits: int | Tensor
) -> Tensor:
    """A permutation of 0 to `length` - 1, at some positions, each with a length and width of its own."""
    ids = _permute(positions, half_bits, keys)
    outside = torch.nonzero(ids >= length).flatten()
    while len(outside):  # cycle walking: apply the permutation again until it lands inside
        some: Any = [_at(key, outside) for key in keys]
        ids[outside] = _permute(ids[outside], _at(half_bits, outside), some)
        outside = outside[ids[outside] >= _at(length, outside)]
    return ids


def _at(value: int | Tensor, places: Tensor) -> int | Tensor:
    return value[places] if isinstance(value, Tensor) else value


def _shuffle_blocks(positions: Tensor, length: int, block: int, keys: list[int]) -> Tensor:
    """The same by blocks: a permutation of whole blocks, of which the last may reach past the end."""
    blocks = -(-length // block)
    window = min(_WINDOW, blocks) * block
    number = positions // window
    size = (blocks * block - number * window).clamp(max=window)  # the last window may be short
    of_window = [random.bits(key, number) for key in keys]
    slot = number * window + _shuffle(positions % window, size, of_window, half_width(window))
    return _shuffle(slot // block, blocks, keys, half_width(blocks)) * block + slot % block


def half_width(length: int) -> int:
    """Bits in each half of the Feistel network, for `length` samples."""
    return max((max(length - 1, 1).bit_length() + 1) // 2, 1)


def order_keys(seed: int, epoch: int, what: str = "order") -> list[int]:
    """The round keys of an epoch's permutation."""
    return [random.key(what, seed, epoch, turn) for turn in range(_ROUNDS)]


def _permute(x: Tensor, half_bits: int | Tensor, keys: list[int] | list[Tensor]) -> Tensor:
    mask = (1 << half_bits) - 1
    left, right = x >> half_bits, x & mask
    for key in keys:
        left, right = right, left ^ (random.bits(key, right) & mask)
    return (left << half_bits) | right


def lane_positions(step_in_epoch: int, batch: int, lanes: int) -> Tensor:
    """The positions of a step as [lane, sample]: sample j of the batch is in lane j mod `lanes`."""
    first = step_in_epoch * batch
    return torch.arange(first, first + batch).view(batch // lanes, lanes).t()
