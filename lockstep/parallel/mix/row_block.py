"""Each worker along data keeps and updates some rows of fully connected layers; all else is everyone's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor, nn

from lockstep.comm.group import Group
from lockstep.comm.reducer import Shard
from lockstep.comm.shard.shard_block import CHUNK, ShardBlock
from lockstep.parallel.mix.row_cut import RowCut
from lockstep.parallel.shard.sharded_model import Places, ShardedModel
from lockstep.parallel.split.axes import CHANNEL, Axes


@dataclass(frozen=True)
class RowBlock(ShardBlock):
    """One weight, cut where `edges` say: the first element of each share, and the end."""

    edges: tuple[int, ...] = ()

    @cached_property
    def starts(self) -> list[int]:
        """Where the weight begins and ends."""
        return [0, self.edges[-1]]

    @cached_property
    def bounds(self) -> list[int]:
        """Where each share begins, and the end."""
        return list(self.edges)


class RowSharedModel(ShardedModel):
    """A model, and this worker's rows of some weights, by the name of each.

    Training takes those rows from the share. The model gets all rows only when it is evaluated.
    """

    def __init__(self, model: nn.Module, cuts: Mapping[str, RowCut], group: Group) -> None:
        shapes = {name: torch.Size([cut.outs, cut.ins]) for name, cut in cuts.items()}
        blocks = [RowBlock((shapes[n],), group.size, edges=tuple(cut.bounds)) for n, cut in cuts.items()]
        super().__init__(model, [[name] for name in cuts], group, blocks=blocks)
        self._cuts, self._axes = cuts, Axes(channel=group)

    def rows(self, name: str) -> Tensor:
        """[own, ins]: this worker's rows of a weight."""
        return self.share.pieces[name].view(-1, self._cuts[name].ins)

    def shards(self, params: Sequence[str]) -> list[Shard]:
        """None: gradients of these weights are not reduced, since a worker has those of all lanes."""
        return []

    def prepare(self) -> None:
        """Nothing: a step needs no more than the rows."""

    @torch.no_grad()
    def by_chunks(self, grads: Places) -> Places:
        """The same elements of gradients, in whole chunks of 2¹⁶: some go to a neighbour. A collective."""
        found = dict(grads)
        for name, cut in self._cuts.items():
            have = [range(*ends) for ends in pairwise(cut.bounds)]
            edges = [-(-edge // CHUNK) * CHUNK for edge in cut.bounds[:-1]] + cut.bounds[-1:]
            edges = [min(edge, cut.bounds[-1]) for edge in edges]
            want = [range(*ends) for ends in pairwise(edges)]
            if have == want:
                continue
            own = found.pop((name, have[cut.rank].start))
            moved = self._axes.move(CHANNEL, own, 0, [(h,) for h in have], [(w,) for w in want])
            if len(moved):
                found[name, want[cut.rank].start] = moved
        return found
