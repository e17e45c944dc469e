"""Gradients become rows of bytes and come back, by PyTorch: on a GPU, and where there is no C compiler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.comm.compress.block_layout import BlockLayout
from lockstep.comm.compress.codec import make_codec
from lockstep.comm.compress.feedback import Feedback
from lockstep.comm.tree import LaneTree


@dataclass(frozen=True)
class Part:
    """Bytes [rows, …] of some lanes: one lane's rows as they travel, or the sum over a subtree in fp32."""

    rows: Tensor
    height: int
    is_packed: bool


class TorchRows:
    """The rows of one bucket: all blocks in one table."""

    def __init__(self, layout: BlockLayout, feedback: Feedback, rank: int) -> None:
        self._codec, self._layout, self._feedback, self._rank = (
            make_codec(feedback.compression),
            layout,
            feedback,
            rank,
        )
        self._table = layout.table(feedback.device)
        self._lost: dict[int, Tensor] = {}  # by lane: what this step leaves out

    def add_lane(self, lane: int, grads: Sequence[Tensor], sums: bool) -> tuple[Tensor, Tensor | None]:
        """The rows that a lane's gradients become; if it `sums` them, also what these rows say."""
        kept, table = self._feedback.lanes[lane], self._table
        self._layout.fill(table, grads)
        for rows, blocks in self._layout.views(table, [kept[name] for name in self._layout.names]):
            rows.add_(blocks)
        packed = self._codec.encode(table)
        found = self._codec.decode(packed)
        self._lost[lane] = table - found
        return packed, found if sums else None

    def pack_mean(self, parts: Sequence[Part]) -> Tensor:
        """The rows that this worker's means become: of all lanes' rows of them, or sums over subtrees."""
        tree, device = LaneTree(), self._table.device
        for part in parts:
            rows = part.rows.to(device, copy=not part.is_packed)
            tree.add([self._codec.decode(rows) if part.is_packed else rows.view(torch.float32)], part.height)
        mean = tree.mean()[0]
        for rows, blocks in self._own_views(mean):
            rows.add_(blocks)
        packed = self._codec.encode(mean)
        self._lost_mean = mean - self._codec.decode(packed)
        return packed

    def read(self, packed: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
        """The means that rows say, with the memory format of an example each."""
        return self._layout.read(self._codec.decode(packed.to(self._table.device)), like)

    def commit(self, bad: Tensor | None) -> None:
        """Remember what the step left out, unless it is bad."""
        layout, pairs = self._layout, self._own_views(self._lost_mean)
        for lane, lost in self._lost.items():
            pairs += layout.views(lost, [self._feedback.lanes[lane][name] for name in layout.names])
        for rows, blocks in pairs:
            blocks.copy_(rows if bad is None else torch.where(bad, blocks, rows))
        self._lost.clear()

    def _own_views(self, rows: Tensor) -> list[tuple[Tensor, Tensor]]:
        return self._layout.own_views(
            rows, self._rank, [self._feedback.means[name] for name in self._layout.names]
        )
