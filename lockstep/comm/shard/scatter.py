"""A bucket whose means stay where they are summed: the first half of an exchange, and no buffer that stays.

A gradient's path: backward → lane tree → bucket → group → lane tree → optimizer, on a share of each block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.comm.bucket import Bucket, ReducedTensor
from lockstep.comm.exchange import ExchangeShape, write_mean
from lockstep.comm.group import Group
from lockstep.comm.shard.block import Block
from lockstep.comm.transport import Round
from lockstep.comm.tree import Leaf, all_heights


class ScatteredBucket(Bucket):
    """The tensors of a block; `reduce` gives this worker's piece of each mean, flat; empty if it has none.

    Each lane's tensors are copied into one flat buffer, which is all that waits for other lanes.
    """

    def __init__(
        self, group: Group, lanes: int, entries: list[ReducedTensor], indices: list[int], block: Block
    ) -> None:
        self._group, self._block = group, block
        heights, like, wire = all_heights(lanes, group.size), entries[0].like, entries[0].wire
        self._shape = ExchangeShape(heights, block.length, like.dtype, wire, like.device)
        super().__init__(group, lanes, entries, indices)

    def _prepare(self, group: Group, lanes: int) -> None:
        """Nothing: its buffers live for a step."""

    @torch.no_grad()
    def add_leaf(self, height: int) -> None:
        """Add the collected tensors of a lane, or of a subtree of this height, to the tree."""
        shape = self._shape
        flat = torch.empty(shape.length, dtype=shape.dtype, device=shape.device)
        self._block.fill(flat, [self.leaf[place] for place in range(len(self.indices))])
        self._tree.add([flat], height)
        self._left -= 1 << height
        self.leaf.clear()

    @torch.no_grad()
    def pack(self) -> None:
        """Keep only the roots, as they travel."""
        self._roots = [flat.to(self._shape.travels_as) for _, _, (flat,) in self._tree.roots()]
        self._tree.roots().clear()
        self._mark_filled()

    def _exchange_means(self) -> Leaf:
        roots, self._roots = self._roots, []
        block, group, shape = self._block, self._group, self._shape
        near = [root.cpu() for root in roots] if group.stages(shape.device) else roots
        over = _by_messages if near[0].device.type == "cpu" else _by_all_to_all
        share = over(group, near, block, shape).to(shape.device, shape.dtype)
        if self._on_gpu:  # memory that two streams use must not be used again too early
            for tensor in roots:
                tensor.record_stream(self._stream)
            share.record_stream(torch.cuda.default_stream(self._device))
        found = [share[:0]] * len(block.shapes)
        for piece in block.pieces(group.rank):
            found[piece.index] = share[piece.offset : piece.offset + piece.stop - piece.start]
        return found


def _by_messages(group: Group, roots: list[Tensor], block: Block, shape: ExchangeShape) -> Tensor:
    """This worker's share of the mean, from all workers' roots."""
    rank, mine = group.rank, roots[0].new_empty(block.size(group.rank))
    rows = {
        other: [torch.empty_like(mine) for _ in shape.heights[other]] for other in group.others if len(mine)
    }
    received = [(other, row) for other in rows for row in rows[other]]
    sent = [(o, root[block.share(o)]) for o in group.others for root in roots if block.size(o)]
    rows[rank] = [root[block.share(rank)] for root in roots]

    def add() -> None:
        ordered = [row for worker in sorted(rows) for row in rows[worker]]
        write_mean(ordered, _all(shape), mine, shape) if len(mine) else None

    group.swap(Round(received, sent), add, Round())
    return mine


def _by_all_to_all(group: Group, roots: list[Tensor], block: Block, shape: ExchangeShape) -> Tensor:
    """The same by a collective that NCCL has."""
    size, heights = block.size(group.rank), shape.heights
    sent = torch.cat([root[block.share(worker)] for worker in range(group.size) for root in roots])
    counts = [len(roots) * block.size(worker) for worker in range(group.size)]
    rows = sent.new_empty(len(_all(shape)) * size)
    group.all_to_all(rows, sent, [len(own) * size for own in heights], counts)
    mine = sent.new_empty(size)
    if size:
        write_mean(list(rows.view(-1, size)), _all(shape), mine, shape)
    return mine


def _all(shape: ExchangeShape) -> list[int]:
    return [height for worker in shape.heights for height in worker]


def gather_share(group: Group, block: Block, share: Tensor) -> Tensor:
    """The flat buffer of a block from all workers' shares."""
    staged = group.stages(share.device)
    near = share.cpu() if staged else share
    flat = torch.zeros(block.length, dtype=share.dtype, device=near.device)
    flat[block.share(group.rank)] = near
    if near.device.type == "cpu":
        received = [(o, flat[block.share(o)]) for o in group.others if block.size(o)]
        sent = [(o, near) for o in group.others if len(near)]
        group.swap(Round(received, sent), lambda: None, Round())
    else:
        for worker in range(group.size):
            if block.size(worker):
                group.broadcast(flat[block.share(worker)], worker)
    return flat.to(share.device)
