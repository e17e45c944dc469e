"""The lane tree: the one order in which anything is summed over lanes, the fixed equal slices of a batch.

A gradient's path: backward → lane tree → bucket → group → lane tree → optimizer. The tree is the balanced
binary tree over lanes 0…V−1. Lanes arrive in order, and two complete subtrees are added as soon as both
exist and are halves of one larger subtree, so at most 2·log₂(V) partial sums are alive. A worker that
holds a range of the lanes is left with the roots of its maximal aligned subtrees.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.spec.rule.lane_share import all_heights, subtrees, worker_lanes

__all__ = ["LaneTree", "Leaf", "all_heights", "subtrees", "tree_sum", "worker_lanes"]

Leaf = list[Tensor]


class LaneTree:
    """Sums lists of tensors, one list per lane, in the order of the lane tree.

    With a `wire` type every node is rounded to it, so that the bits do not depend on which nodes are sent.
    """

    def __init__(self, first: int = 0, wire: torch.dtype | None = None) -> None:
        self._next, self._wire = first, wire
        self._partial: list[tuple[int, int, Leaf]] = []  # (first lane, height, sum)

    def add(self, leaf: Leaf, height: int = 0) -> None:
        """Add the next lane's tensors, or the sum over the next subtree; the tree may write into them."""
        first = self._next
        self._next += 1 << height
        leaf = self._round(leaf)
        while self._partial and self._partial[-1][1] == height and self._partial[-1][0] % (2 << height) == 0:
            first, _, left = self._partial.pop()
            if leaf:
                torch._foreach_add_(left, leaf)
            leaf, height = self._round(left), height + 1
        self._partial.append((first, height, leaf))

    def roots(self) -> list[tuple[int, int, Leaf]]:
        """What is summed so far: (first lane, height, sum) of each maximal aligned subtree."""
        return self._partial

    def root(self) -> tuple[int, Leaf]:
        """The tree's height and the sum over all lanes, whose number must have been a power of two."""
        assert len(self._partial) == 1, "the lane tree is not complete"
        return self._partial[0][1:]

    def mean(self) -> Leaf:
        """The sum over all lanes times 1/V."""
        height, total = self.root()
        if total and height:
            torch._foreach_mul_(total, 1.0 / (1 << height))
        return self._round(total)

    def write_mean(self, output: Leaf) -> None:
        """Write the mean into other tensors of its type or of the wire type, in one pass if it can be."""
        height, total = self.root()
        for mean, found in zip(output, total, strict=True):
            if self._wire is None:
                torch.mul(found, 1.0 / (1 << height), out=mean)
        if self._wire is not None:
            torch._foreach_copy_(output, self.mean())

    def _round(self, leaf: Leaf) -> Leaf:
        """Round every tensor to the wire type, if there is one."""
        return leaf if self._wire is None else [tensor.to(self._wire).to(tensor.dtype) for tensor in leaf]


def tree_sum(values: Tensor) -> Tensor:
    """Sum over dim 0 as a balanced binary tree; rows of zeros fill up to a power of two."""
    rows = len(values)
    size = 1 << max(rows - 1, 0).bit_length()
    if size != rows:
        values = torch.cat([values, values.new_zeros(size - rows, *values.shape[1:])])
    while len(values) > 1:
        values = values[0::2] + values[1::2]
    return values[0]
