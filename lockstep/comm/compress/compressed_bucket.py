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
from lockstep.comm.compress.codec_library import compresses_by
from lockstep.comm.compress.feedback import Feedback
from lockstep.comm.compress.feedback_bucket import FeedbackBucket
from lockstep.comm.compress.native_rows import NativeRows
from lockstep.comm.compress.torch_rows import Part, TorchRows
from lockstep.comm.group import Group
from lockstep.comm.transport import Round
from lockstep.comm.tree import LaneTree, Leaf, all_heights, subtrees
from lockstep.spec.rule.compression import SUM_BYTES


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
        self._how, self._layout = feedback.compression, BlockLayout(feedback, self._names, group.size)
        self._heights, self._subtrees = all_heights(lanes, group.size), subtrees(self._own)
        maker = NativeRows if compresses_by(self._device) == "c" else TorchRows
        self._rows: NativeRows | TorchRows = maker(self._layout, feedback, group.rank)

    def _prepare(self, group: Group, lanes: int) -> None:
        """Nothing: its buffers live for a step."""

    def begin(self) -> None:
        super().begin()
        self._roots: list[list[Tensor]] = []  # of each root of this worker: what travels for it
        self._open: list[Tensor] = []  # of the root that is not complete

    def _add_lane(self, lane: int, grads: list[Tensor]) -> None:
        first, height = self._subtrees[len(self._roots)]
        packs = self._how.travels_packed(height)
        packed, found = self._rows.add_lane(lane, grads, sums=not packs)
        if found is None:
            self._open.append(packed)
        else:
            self._tree.add([found])
        if lane + 1 == first + (1 << height):
            if not packs:
                self._open = [self._tree.root()[1][0].view(torch.uint8)]
            self._roots.append(self._open)
            self._tree, self._open = LaneTree(lane + 1), []

    def _exchange_means(self) -> Leaf:
        """The means of all lanes, as all workers get them: what their owners made of them."""
        rows = self._layout.rank_rows
        packed = self._rows.pack_mean(self._parts([self._roots])) if self._alone else self._swap(rows)
        self._roots = []
        return self._rows.read(packed, [entry.like for entry in self._entries])

    def _swap(self, rows: list[range]) -> Tensor:
        """Send every worker its rows of the roots, sum this worker's, and gather what all made of theirs."""
        group, own, width = self._group, rows[self._group.rank], self._how.row_bytes
        near = [[part.cpu() for part in root] for root in self._roots]
        sent = [
            (o, part[rows[o].start : rows[o].stop]) for o in group.others for root in near for part in root
        ]
        arrived = {o: self._empty(o, len(own)) for o in group.others}
        received = [(o, part) for o in group.others for root in arrived[o] for part in root]
        arrived[group.rank] = [[part[own.start : own.stop] for part in root] for root in near]
        packed = torch.empty(sum(map(len, rows)), width, dtype=torch.uint8)

        def work() -> None:
            roots = [arrived[rank] for rank in range(group.size)]
            packed[own.start : own.stop] = self._rows.pack_mean(self._parts(roots))

        mine = packed[own.start : own.stop]
        second = [(o, packed[rows[o].start : rows[o].stop]) for o in group.others]
        group.swap(_round(received, sent), work, _round(second, [(o, mine) for o in group.others]))
        self.sent_bytes = sum(part.numel() for _, part in sent) + len(group.others) * mine.numel()
        return packed

    def _empty(self, rank: int, count: int) -> list[list[Tensor]]:
        """Room for what a worker sends for each of its roots."""
        found = []
        for height in self._heights[rank]:
            parts, width = 1, SUM_BYTES
            if self._how.travels_packed(height):
                parts, width = 1 << height, self._how.row_bytes
            found.append([torch.empty(count, width, dtype=torch.uint8) for _ in range(parts)])
        return found

    def _parts(self, roots: list[list[list[Tensor]]]) -> list[Part]:
        """What all workers sent for their roots, in the order of lanes."""
        return [
            Part(part, 0 if packed else height, packed)
            for heights, found in zip(self._heights, roots, strict=True)
            for height, parts in zip(heights, found, strict=True)
            for packed in (self._how.travels_packed(height),)
            for part in parts
        ]

    @torch.no_grad()
    def commit(self, bad: Tensor | None) -> None:
        self._rows.commit(bad)


def _round(received: list[tuple[int, Tensor]], sent: list[tuple[int, Tensor]]) -> Round:
    """Messages that have something in them; a worker may own no row."""
    return Round(*([(rank, part) for rank, part in each if part.numel()] for each in (received, sent)))
