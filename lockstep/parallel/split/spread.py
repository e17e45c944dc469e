"""How a value lies on the workers that share a lane: rows in bands, channels in ranges.

Bands are a grid in the identity: sums over pixels follow it, whoever computes them. A worker along `spatial`
has an aligned subtree of the bands, so what it sums over them is one partial sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.comm.tree import worker_lanes

Ranges = tuple[range, ...]  # increasing, without overlap


@dataclass(frozen=True)
class Spread:
    """Where a value is: whole everywhere, or rows and channels dealt out."""

    rows: int = (
        0  # of the whole value, if each worker along `spatial` has those of its bands; 0: all have all
    )
    channels: tuple[Ranges, ...] = ()  # of each worker along `channel`; empty: all have all

    @property
    def is_whole(self) -> bool:
        """Whether every worker has all of it."""
        return not self.rows and not self.channels


WHOLE = Spread()


def even_ranges(count: int, parts: int) -> list[range]:
    """Ranges as even as possible."""
    return [worker_lanes(count, parts, part) for part in range(parts)]


def deal_subtrees(leaves: int, workers: int) -> list[range]:
    """An aligned subtree of the leaves, whose number is a power of two, for each worker."""
    return _deal(range(leaves), workers)


def deal_grid(cells: Sequence[range], workers: int) -> list[range]:
    """The rows or channels of each worker: a subtree of the cells that they are cut into."""
    dealt = deal_subtrees(len(cells), workers)
    return [range(cells[own.start].start, cells[own.stop - 1].stop) for own in dealt]


def every_share(cells: Sequence[range]) -> list[range]:
    """What a worker can have of a grid: every worker's under every number of workers."""
    found = {own for workers in range(2, len(cells) + 1) for own in deal_grid(cells, workers)}
    return sorted(found, key=lambda own: (own.start, own.stop))


def _deal(leaves: range, workers: int) -> list[range]:
    if workers == 1:
        return [leaves]
    assert workers <= len(leaves), "every worker needs a leaf"
    left, middle = -(-workers // 2), leaves.start + len(leaves) // 2
    return [*_deal(range(leaves.start, middle), left), *_deal(range(middle, leaves.stop), workers - left)]


def count(ranges: Sequence[range]) -> int:
    """How many numbers are in some ranges."""
    return sum(map(len, ranges))


def take(tensor: Tensor, dim: int, ranges: Sequence[range]) -> Tensor:
    """Some ranges along a dimension, one after another; of one range a view."""
    parts = [tensor.narrow(dim, own.start, len(own)) for own in ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def among_zeros(part: Tensor, dim: int, own: range, shape: torch.Size) -> Tensor:
    """A tensor of the whole shape with a part at its place along a dimension, and zeros elsewhere."""
    if part.shape == shape:
        return part
    whole = part.new_zeros(shape)
    whole.narrow(dim, own.start, len(own)).copy_(part)
    return whole
