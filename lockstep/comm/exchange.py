"""How one bucket is summed between workers: slices, wire types, within a host and between hosts.

Every worker sums one slice, in the order of the lane tree. The others send it this slice of their roots, and
it sends them the means. On one host the workers read each other's roots from shared memory instead. NCCL has
collectives for both halves. Every way, each element goes through the same additions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.comm.group import Group
from lockstep.comm.shared_memory import Shared, share
from lockstep.comm.transport import Round
from lockstep.comm.tree import LaneTree

_CHUNK = 1 << 18  # elements summed at a time on a CPU: fewer have more calls than the cache saves


@dataclass(frozen=True)
class ExchangeShape:
    """The heights of each worker's subtrees, and the length, type and wire type of the data."""

    heights: list[list[int]]
    length: int
    dtype: torch.dtype
    wire: torch.dtype | None
    device: torch.device

    @property
    def travels_as(self) -> torch.dtype:
        return self.wire or self.dtype

    @property
    def slice(self) -> int:
        """Elements that each worker sums."""
        return max(-(-self.length // len(self.heights)), 1)

    @property
    def whole(self) -> int:
        return self.slice * len(self.heights)


def write_mean(rows: list[Tensor], heights: list[int], output: Tensor, shape: ExchangeShape) -> None:
    """Write the mean over all lanes, in lane-tree order, from sums over subtrees, which are overwritten."""
    step = _CHUNK if output.device.type == "cpu" else max(len(output), 1)
    for first in range(0, len(output), step):
        tree = LaneTree(wire=shape.wire)
        for row, height in zip(rows, heights, strict=True):
            tree.add([row[first : first + step].to(shape.dtype)], height)
        tree.write_mean([output[first : first + step]])


def make_exchange(group: Group, shape: ExchangeShape) -> Exchange:
    """An exchange through shared memory if all workers are on one host, else over the group."""
    own = max(map(len, shape.heights))
    near = shape.device.type == "cpu" or group.stages(shape.device)
    size = torch.empty((), dtype=shape.travels_as).element_size()
    memory = share(group, (own * shape.whole + shape.slice) * size) if near else None
    return SharedExchange(group, shape, memory) if memory else exchange_over(group, shape)


def exchange_over(group: Group, shape: ExchangeShape) -> Exchange:
    """An exchange by messages from host memory, or on the GPU by the collectives of NCCL."""
    on_gpu = shape.device.type != "cpu" and not group.stages(shape.device)
    return (CollectiveExchange if on_gpu and group.size > 1 else Exchange)(group, shape)


class Exchange:
    """An exchange by messages: fill `roots`, a flat tensor for each subtree; `run` fills `result`.

    A slice is one message to each worker. Cut into chunks that are summed while the next one arrives, it is
    slower: over gloo a message costs as much time as some 100 KB of it.
    """

    def __init__(self, group: Group, shape: ExchangeShape) -> None:
        self._group, self._shape = group, shape
        self._staged = group.stages(shape.device)
        own = len(shape.heights[group.rank])
        self._sent, self._means = self._host(own * shape.whole), self._host(shape.whole)
        self._lay_out(None if self._staged else self._sent)
        if not self._staged and shape.travels_as == shape.dtype:
            self.result = self._means
        self._prepare(own)

    def run(self) -> None:
        """Exchange and sum; a collective, so every worker calls it."""
        self._swap(self._second)
        if self.result is not self._means:
            self.result.copy_(self._means, non_blocking=True)

    def reduce_scatter(self) -> Tensor:
        """The first half of `run`: the means of this worker's slice, as they travel."""
        self._swap(Round())
        return self._mine

    def close(self) -> None:
        """Give back what the group keeps for it."""

    def slice_roots(self, rank: int) -> Tensor:
        """[roots, elements]: this worker's part of the slice that `rank` sums; valid only before `run`."""
        return torch.stack([self._part(root, rank) for root in self.roots]).cpu()

    def slice_result(self, rank: int) -> Tensor:
        """A worker's slice of the means, as it arrived here."""
        return self._part(self.result, rank).cpu()

    def sum_slice(self, roots: list[Tensor]) -> Tensor:
        """The means of a slice from all workers' `slice_roots`, in the order of the lane tree."""
        output = torch.zeros(self._shape.slice, dtype=self._shape.travels_as)
        self._sum([row for rows in roots for row in rows], output)
        return output.to(self._shape.dtype)

    def _prepare(self, own: int) -> None:
        """Allocate rows for what arrives, and list all messages; an own slice is summed where it lies."""
        shape, rank, others = self._shape, self._group.rank, self._group.others
        self._near = self._sent.view(own, shape.whole)
        free = iter(self._host((sum(map(len, shape.heights)) - own) * shape.slice).view(-1, shape.slice))
        rows = {other: [next(free) for _ in shape.heights[other]] for other in others}
        received = [(other, row) for other in others for row in rows[other]]
        sent = [(other, self._part(root, other)) for other in others for root in self._near]
        self._mine = self._part(self._means, rank)
        self._first = Round(received, sent)
        self._second = Round(
            [(other, self._part(self._means, other)) for other in others],
            [(other, self._mine) for other in others],
        )
        rows[rank] = [self._part(root, rank) for root in self._near]
        self._rows = [row for worker in sorted(rows) for row in rows[worker]]

    def _swap(self, second: Round) -> None:
        """Gather this worker's slice of all roots, write its means, then exchange the second round."""
        if self._staged:
            for copy, root in zip(self._near, self.roots, strict=True):
                copy.copy_(root, non_blocking=True)
            self._wait_for_gpu()
        self._group.swap(self._first, lambda: self._sum(self._rows, self._mine), second)

    def _part(self, flat: Tensor, rank: int) -> Tensor:
        return flat[rank * self._shape.slice : (rank + 1) * self._shape.slice]

    def _lay_out(self, memory: Tensor | None) -> None:
        """Allocate the result, and the roots too unless `memory` is given for them."""
        shape, own = self._shape, len(self._shape.heights[self._group.rank])
        if memory is None:
            memory = torch.zeros(own * shape.whole, dtype=shape.travels_as, device=shape.device)
        self.roots = list(memory.view(own, shape.whole))
        self.result = torch.zeros(shape.whole, dtype=shape.dtype, device=shape.device)

    def _sum(self, rows: list[Tensor], output: Tensor) -> None:
        """The mean of one slice from one row for each subtree of all workers."""
        write_mean(rows, [height for worker in self._shape.heights for height in worker], output, self._shape)

    def _host(self, length: int) -> Tensor:
        """A buffer in memory that the group can reach."""
        device = torch.device("cpu") if self._staged else self._shape.device
        return torch.zeros(length, dtype=self._shape.travels_as, device=device, pin_memory=self._staged)

    def _wait_for_gpu(self) -> None:
        if self._staged:
            torch.cuda.current_stream(self._shape.device).synchronize()


class CollectiveExchange(Exchange):
    """An exchange by an all-to-all and an all-gather, which NCCL runs on the GPU."""

    def run(self) -> None:
        """Exchange and sum; a collective, so every worker calls it."""
        self._group.all_gather(self._means, self.reduce_scatter())
        if self.result is not self._means:
            self.result.copy_(self._means, non_blocking=True)

    def reduce_scatter(self) -> Tensor:
        """The first half of `run`: the means of this worker's slice, as they travel."""
        group, size = self._group, self._shape.slice
        counts = [len(heights) for heights in self._shape.heights]
        own = counts[group.rank]
        by_worker = self._sent.view(own, group.size, size).transpose(0, 1).reshape(-1)
        group.all_to_all(self._received, by_worker, [n * size for n in counts], [own * size] * group.size)
        self._sum(list(self._received.view(-1, size)), self._mine)
        return self._mine

    def _prepare(self, own: int) -> None:
        rows, size = sum(map(len, self._shape.heights)), self._shape.slice
        self._received, self._mine = self._host(rows * size), self._host(size)


class SharedExchange(Exchange):
    """An exchange through memory that all workers of a host share; roots are read without a copy."""

    def __init__(self, group: Group, shape: ExchangeShape, memory: Shared) -> None:
        self._group, self._shape, self._memory = group, shape, memory
        self._staged = group.stages(shape.device)
        self._roots, self._mean_parts = [], []
        for piece, heights in zip(memory.pieces, shape.heights, strict=True):
            flat = piece.view(shape.travels_as)
            self._roots.append(flat[: len(heights) * shape.whole].view(len(heights), shape.whole))
            self._mean_parts.append(flat[-shape.slice :])
        self._lay_out(None if self._staged else self._roots[group.rank])

    def run(self) -> None:
        """Exchange and sum; a collective, so every worker calls it."""
        group = self._group
        if self._staged:
            for mine, root in zip(self._roots[group.rank], self.roots, strict=True):
                mine.copy_(root, non_blocking=True)
            self._wait_for_gpu()
        self._memory.barrier()  # all roots are written
        parts = [self._part(row, group.rank) for roots in self._roots for row in roots]
        self._sum(parts, self._mean_parts[group.rank])
        self._memory.barrier()  # all means are written, and no worker reads the roots any more
        for rank, mean in enumerate(self._mean_parts):
            self._part(self.result, rank).copy_(mean, non_blocking=True)
        self._wait_for_gpu()

    def close(self) -> None:
        self._memory.close()
