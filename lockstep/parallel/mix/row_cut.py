"""How the outputs of a fully connected layer are dealt to the workers along data, and what each computes.

N samples of a lane. Each worker has whole slices of the outputs (`train.slices`), an aligned subtree of them,
so its part of the data gradient is one partial sum. Every lane is computed at its own shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.comm.tree import LaneTree
from lockstep.kernels.lrn import widen
from lockstep.parallel.split.axes import sum_leaves
from lockstep.parallel.split.spread import deal_grid, deal_subtrees, even_ranges


@dataclass(frozen=True)
class RowCut:
    """A weight [outs, ins] over so many workers, of which this is number `rank`."""

    ins: int
    outs: int
    slices: int
    workers: int
    rank: int
    by_slice: frozenset[str] = frozenset()  # which of forward and weight one worker computes slice by slice

    @cached_property
    def of_all(self) -> list[range]:
        """The outputs of every worker."""
        return deal_grid(even_ranges(self.outs, self.slices), self.workers)

    @property
    def own(self) -> range:
        """This worker's outputs."""
        return self.of_all[self.rank]

    @cached_property
    def own_slices(self) -> list[slice]:
        """This worker's slices, as its own outputs count."""
        dealt, first = deal_subtrees(self.slices, self.workers)[self.rank], self.own.start
        edges = even_ranges(self.outs, self.slices)[dealt.start : dealt.stop]
        return [slice(edge.start - first, edge.stop - first) for edge in edges]

    @property
    def bounds(self) -> list[int]:
        """Where the elements of every worker begin in the weight, and the end."""
        return [own.start * self.ins for own in self.of_all] + [self.outs * self.ins]

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[N, own]: this worker's outputs of a lane."""
        pieces = self._pieces("forward")
        found = [F.linear(x, weight[own], None if bias is None else bias[own]) for own in pieces]
        return found[0] if len(found) == 1 else torch.cat(found, 1)

    def weight_gradient(self, dy: Tensor, x: Tensor) -> Tensor:
        """[own, ins]: of this worker's rows, from a lane."""
        found = [dy[:, own].t() @ x for own in self._pieces("weight")]
        return found[0] if len(found) == 1 else torch.cat(found)

    def _pieces(self, part: str) -> list[slice]:
        return self.own_slices if part in self.by_slice else [slice(None)]

    def partial_sum(self, dy: Tensor, weight: Tensor) -> Tensor:
        """[N, ins]: this worker's part of a lane's data gradient."""
        return sum_leaves([widen(dy[:, part] @ weight[part]) for part in self.own_slices])

    def add_up(self, partials: Sequence[Tensor]) -> Tensor:
        """A lane's data gradient from the partial sums of all workers; it may write into them."""
        tree = LaneTree()
        for part, own in zip(partials, deal_subtrees(self.slices, self.workers), strict=True):
            tree.add([part], len(own).bit_length() - 1)
        return tree.root()[1][0]

    def sent_bytes(self, lanes: int, own_lanes: int, needs_input: bool, dtype: torch.dtype) -> int:
        """What this worker sends in a step for each sample of a lane, of so many lanes, some its own.

        Partial sums go in fp32 at least.
        """
        others, theirs, own = self.workers - 1, lanes - own_lanes, len(self.own)
        values = own_lanes * self.ins * others + theirs * own + own_lanes * (self.outs - own)
        partials = needs_input * theirs * self.ins
        return values * dtype.itemsize + partials * max(dtype.itemsize, 4)
