"""A bucket whose gradients travel compressed: each lane's by itself, then the mean by its owner.

A gradient's path: backward → codec → lane tree → codec → optimizer. What a codec leaves out is remembered,
and added the next time. A root of the lane tree travels as the compressed gradients of its lanes, or as their
sum where that is smaller: the receiver adds the same numbers in the same order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.comm.bucket import ReducedTensor
from lockstep.comm.compress.block_layout import BlockLayout
from lockstep.comm.compress.codec import make_codec
from lockstep.comm.compress.feedback import Feedback
from lockstep.comm.compress.feedback_bucket import FeedbackBucket
from lockstep.comm.group import Group
from lockstep.comm.transport import Round
from lockstep.comm.tree import LaneTree, Leaf, all_heights
from lockstep.spec.rule.compression import BLOCK

_SUM_BYTES = 4 * BLOCK


class CompressedBucket(FeedbackBucket):
    """Entries that a codec compresses block by block."""

    def __init__(
        self,
        group: Group,
        lanes: int,
        entries: list[ReducedTensor],
        indices: list[int],
        feedback: Feedback,
    ) -> None:
        super().__init__(group, lanes, entries, indices, feedback)
        self._codec = make_codec(feedback.compression)
        self._layout = BlockLayout(feedback, self._names, group.size)
        self._heights = all_heights(lanes, group.size)
        self._table = self._layout.table(self._device)

    def _prepare(self, group: Group, lanes: int) -> None:
        """Nothing: its buffers live for a step."""

    def begin(self) -> None:
        super().begin()
        self._rows: list[list[Tensor]] = []  # of each root of this worker: what travels for it
        self._open: list[Tensor] = []  # of the root that is not complete
        self._lost: dict[int, Tensor] = {}  # by lane: what this step leaves out

    def _add_lane(self, lane: int, grads: list[Tensor]) -> None:
        kept, table = self._feedback.lanes[lane], self._table
        self._layout.fill(table, grads)
        for rows, blocks in self._layout.views(table, [kept[name] for name in self._layout.names]):
            rows.add_(blocks)
        packed = self._codec.encode(table)
        found = self._codec.decode(packed)
        self._lost[lane] = table - found
        self._tree.add([found])
        self._open.append(packed)
        self._close_root()

    def _close_root(self) -> None:
        """If the lane that is added now completes a root, keep what travels for it."""
        if self._alone:
            self._open.clear()
            return
        done = sum(1 << height for height in self._heights[self._group.rank][: len(self._rows)])
        height = self._heights[self._group.rank][len(self._rows)]
        if self.num_lanes + 1 < done + (1 << height):
            return
        packed, self._open = self._open, []
        if self._travels_packed(height):
            self._rows.append(packed)
        else:
            (total,) = self._tree.roots()[len(self._rows)][2]
            self._rows.append([total.view(torch.uint8)])

    def _travels_packed(self, height: int) -> bool:
        return self._codec.row_bytes << height < _SUM_BYTES

    def _exchange_means(self) -> Leaf:
        """The means of all lanes, as all workers get them: what their owners made of them."""
        rows = self._layout.rank_rows
        packed = self._pack_mean(self._tree.mean()[0]) if self._alone else self._swap(rows)
        return self._layout.read(self._codec.decode(packed), [entry.like for entry in self._entries])

    def _swap(self, rows: list[range]) -> Tensor:
        """Send every worker its rows of the roots, sum this worker's, and gather what all made of theirs."""
        group, device = self._group, self._table.device
        near = [[part.cpu() for part in root] for root in self._rows]
        own, width = rows[group.rank], self._codec.row_bytes
        sent = [
            (o, part[rows[o].start : rows[o].stop]) for o in group.others for root in near for part in root
        ]
        arrived = {o: self._empty(o, len(own)) for o in group.others}
        received = [(o, part) for o in group.others for root in arrived[o] for part in root]
        arrived[group.rank] = [[part[own.start : own.stop] for part in root] for root in near]
        packed = torch.empty(sum(map(len, rows)), width, dtype=torch.uint8)

        def work() -> None:
            roots = [arrived[rank] for rank in range(group.size)]
            packed[own.start : own.stop] = self._pack_mean(self._sum(roots, device)).cpu()

        mine = packed[own.start : own.stop]
        second = [(o, packed[rows[o].start : rows[o].stop]) for o in group.others]
        group.swap(_round(received, sent), work, _round(second, [(o, mine) for o in group.others]))
        self.sent_bytes = sum(part.numel() for _, part in sent) + len(group.others) * mine.numel()
        return packed.to(device)

    def _empty(self, rank: int, count: int) -> list[list[Tensor]]:
        """Room for what a worker sends for each of its roots."""
        found = []
        for height in self._heights[rank]:
            parts, width = 1, _SUM_BYTES
            if self._travels_packed(height):
                parts, width = 1 << height, self._codec.row_bytes
            found.append([torch.empty(count, width, dtype=torch.uint8) for _ in range(parts)])
        return found

    def _sum(self, roots: list[list[list[Tensor]]], device: torch.device) -> Tensor:
        """The mean of this worker's rows, in the order of the lane tree."""
        tree = LaneTree()
        for heights, found in zip(self._heights, roots, strict=True):
            for height, parts in zip(heights, found, strict=True):
                if self._travels_packed(height):
                    for part in parts:
                        tree.add([self._codec.decode(part.to(device))])
                else:
                    tree.add([parts[0].to(device, copy=True).view(torch.float32)], height)
        return tree.mean()[0]

    def _pack_mean(self, mean: Tensor) -> Tensor:
        """Compress this worker's rows of the mean, and remember what is left out."""
        layout, rank = self._layout, self._group.rank
        means = [self._feedback.means[name] for name in layout.names]
        for rows, blocks in layout.own_views(mean, rank, means):
            rows.add_(blocks)
        packed = self._codec.encode(mean)
        self._lost_mean = mean - self._codec.decode(packed)
        return packed

    @torch.no_grad()
    def commit(self) -> None:
        layout, feedback = self._layout, self._feedback
        pairs = layout.own_views(
            self._lost_mean, self._group.rank, [feedback.means[name] for name in layout.names]
        )
        for lane, lost in self._lost.items():
            pairs += layout.views(lost, [feedback.lanes[lane][name] for name in layout.names])
        for rows, blocks in pairs:
            blocks.copy_(rows)
        self._lost.clear()


def _round(received: list[tuple[int, Tensor]], sent: list[tuple[int, Tensor]]) -> Round:
    """Messages that have something in them; a worker may own no row."""
    return Round(*([(rank, part) for rank, part in each if part.numel()] for each in (received, sent)))
