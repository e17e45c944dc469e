"""The lane tree: the one order in which anything is summed over lanes.

A gradient's way: backward → lane tree → optimizer. The tree is the balanced binary tree over lanes
0…V−1; lanes arrive in order, and as in a binary counter two complete subtrees of equal height are
added as soon as both exist, so at most log₂(V) + 1 partial sums are alive.
"""

from __future__ import annotations

import torch
from torch import Tensor

Leaf = list[Tensor]


class LaneTree:
    """Sums lists of tensors, one list a lane, in the order of the lane tree."""

    def __init__(self) -> None:
        self._partial: list[tuple[int, Leaf]] = []  # (height, sum), heights strictly falling

    def add(self, leaf: Leaf, height: int = 0) -> None:
        """Add the next lane's tensors, or the sum over the next subtree; the tree may write into them."""
        while self._partial and self._partial[-1][0] == height:
            left = self._partial.pop()[1]
            if leaf:
                torch._foreach_add_(left, leaf)
            leaf, height = left, height + 1
        self._partial.append((height, leaf))

    def root(self) -> tuple[int, Leaf]:
        """The tree's height and the sum over all lanes, whose number must have been a power of two."""
        assert len(self._partial) == 1, "the lane tree is not complete"
        return self._partial.pop()

    def mean(self) -> Leaf:
        """The sum over all lanes times 1/V."""
        height, total = self.root()
        if total and height:
            torch._foreach_mul_(total, 1.0 / (1 << height))
        return total


def tree_sum(values: Tensor) -> Tensor:
    """Sum over dim 0 as a balanced binary tree over a power of two of rows, zeros standing in for more."""
    rows = len(values)
    size = 1 << max(rows - 1, 0).bit_length()
    if size != rows:
        values = torch.cat([values, values.new_zeros(size - rows, *values.shape[1:])])
    while len(values) > 1:
        values = values[0::2] + values[1::2]
    return values[0]
