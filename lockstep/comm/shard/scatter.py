"""A bucket whose means stay where they are summed: the first half of an exchange, and no buffer that stays.

A gradient's path: backward → lane tree → bucket → group → lane tree → optimizer, on a share of each block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.comm.bucket import Bucket, ReducedTensor
from lockstep.comm.exchange import ExchangeShape, write_mean
from lockstep.comm.group import Group
from lockstep.comm.shard.shard_block import ShardBlock
from lockstep.comm.transport import Round
from lockstep.comm.tree import Leaf, all_heights


class ScatteredBucket(Bucket):
    """The tensors of a block; `reduce` gives this worker's piece of each mean, flat; empty if it has none.

    Each lane's tensors are copied into one flat buffer, which is all that waits for other lanes.
    """

    def __init__(
        self, group: Group, lanes: int, entries: list[ReducedTensor], indices: list[int], block: ShardBlock
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
        for piece in block.pieces(group.rank % block.num_shares):
            found[piece.index] = share[piece.offset : piece.offset + piece.stop - piece.start]
        return found


def _by_messages(group: Group, roots: list[Tensor], block: ShardBlock, shape: ExchangeShape) -> Tensor:
    """This worker's share of the mean, from all workers' roots."""
    rank, count = group.rank, block.num_shares
    mine = roots[0].new_empty(block.size(rank % count))
    rows = {
        other: [torch.empty_like(mine) for _ in shape.heights[other]] for other in group.others if len(mine)
    }
    received = [(other, row) for other in rows for row in rows[other]]
    sent = [
        (o, root[block.share(o % count)]) for o in group.others for root in roots if block.size(o % count)
    ]
    rows[rank] = [root[block.share(rank % count)] for root in roots]

    def add() -> None:
        ordered = [row for worker in sorted(rows) for row in rows[worker]]
        write_mean(ordered, _all(shape), mine, shape) if len(mine) else None

    group.swap(Round(received, sent), add, Round())
    return mine


def _by_all_to_all(group: Group, roots: list[Tensor], block: ShardBlock, shape: ExchangeShape) -> Tensor:
    """The same by a collective that NCCL has."""
    size, heights = block.size(group.rank % block.num_shares), shape.heights
    every = [worker % block.num_shares for worker in range(group.size)]
    sent = torch.cat([root[block.share(number)] for number in every for root in roots])
    counts = [len(roots) * block.size(number) for number in every]
    rows = sent.new_empty(len(_all(shape)) * size)
    group.all_to_all(rows, sent, [len(own) * size for own in heights], counts)
    mine = sent.new_empty(size)
    if size:
        write_mean(list(rows.view(-1, size)), _all(shape), mine, shape)
    return mine


def _all(shape: ExchangeShape) -> list[int]:
    return [height for worker in shape.heights for height in worker]


def _holders(group: Group, count: int, rank: int) -> dict[int, int]:
    """From whom a worker takes each share: itself, else one as near as can be."""
    first = rank - rank % count
    found = {number: first + number if first + number < group.size else number for number in range(count)}
    return found | {rank % count: rank}


def gather_share(group: Group, block: ShardBlock, share: Tensor) -> Tensor:
    """The flat buffer of a block from all shares; worker r has share r mod their number."""
    staged, count = group.stages(share.device), block.num_shares
    near = share.cpu() if staged else share
    flat = torch.zeros(block.length, dtype=share.dtype, device=near.device)
    flat[block.share(group.rank % count)] = near
    if near.device.type == "cpu":
        mine = _holders(group, count, group.rank)
        received = [(o, flat[block.share(n)]) for n, o in mine.items() if o != group.rank and block.size(n)]
        asked = [o for o in group.others if _holders(group, count, o)[group.rank % count] == group.rank]
        group.swap(Round(received, [(o, near) for o in asked if len(near)]), lambda: None, Round())
    else:
        for number in range(count):
            if block.size(number):
                group.broadcast(flat[block.share(number)], number)
    return flat.to(share.device)
