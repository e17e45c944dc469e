"""A bucket of tensors and its way through the group.

A gradient's way: backward → lane tree (local) → bucket → group → lane tree (global) → optimizer. A worker
holds the roots of its maximal aligned subtrees. All-to-all brings every worker the slices it reduces, it
sums them in tree order, all-gather returns the result. With one worker the local tree is the whole one,
and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.comm.group import Group
from lockstep.comm.tree import LaneTree, Leaf, subtrees, worker_lanes

_CHUNK = 1 << 16  # elements summed at a time, so that all rows of a chunk stay in the cache


@dataclass(frozen=True)
class Entry:
    """A tensor that is reduced every step: one like it, and the type it travels in if not its own."""

    like: Tensor
    wire: torch.dtype | None = None

    @property
    def num_bytes(self) -> int:
        return self.like.numel() * self.like.element_size()

    def kind(self) -> tuple[object, ...]:
        """Entries of one kind can share a bucket."""
        return self.like.dtype, self.like.device, self.wire


def split(entries: Sequence[Entry], bucket_bytes: float) -> list[list[int]]:
    """Which entries go together: neighbours of one kind, up to the size of a bucket."""
    buckets: list[list[int]] = []
    filled = 0
    for index, entry in enumerate(entries):
        fits = buckets and entry.kind() == entries[buckets[-1][-1]].kind()
        if not fits or filled + entry.num_bytes > bucket_bytes:
            buckets.append([])
            filled = 0
        buckets[-1].append(index)
        filled += entry.num_bytes
    return buckets


class Bucket:
    """Some of the entries: their lane tree, and the memory in which they travel."""

    def __init__(self, group: Group, lanes: int, entries: list[Entry], indices: list[int]) -> None:
        self.indices, self._entries, self._group = indices, entries, group
        self.leaf: dict[int, Tensor] = {}
        self._own = worker_lanes(lanes, group.size, group.rank)
        self._wire, self._device = entries[0].wire, entries[0].like.device
        self._packed = False
        if group.size > 1:
            self._heights = [
                [height for _, height in subtrees(worker_lanes(lanes, group.size, rank))]
                for rank in range(group.size)
            ]
            self._allocate()
        self.begin()

    def begin(self) -> None:
        self.leaf.clear()
        self._tree, self._left, self._packed = LaneTree(self._own.start, self._wire), len(self._own), False

    def is_whole(self) -> bool:
        """Whether all of this worker's lanes are summed."""
        return not self._left

    def rest_height(self) -> int:
        """The height of the subtree that all lanes still missing make up."""
        return self._left.bit_length() - 1

    def add_leaf(self, height: int) -> None:
        """Sum what the lane or subtree gave."""
        self._tree.add([self.leaf[place] for place in range(len(self.indices))], height)
        self._left -= 1 << height
        self.leaf.clear()

    @torch.no_grad()
    def pack(self) -> None:
        """Lay the roots out by the worker that will sum them: [worker, root, slice]."""
        if self._group.size == 1 or self._packed:
            return
        roots = self._tree.roots()
        for number, (_, _, tensors) in enumerate(roots):
            torch._foreach_copy_(self._slots, tensors)
            if len(roots) > 1:
                self._send.view(self._group.size, len(roots), -1)[:, number].copy_(
                    self._flat.view(self._group.size, -1)
                )
        self._packed = True
        if self._device.type == "cuda":
            self._filled.record()

    @torch.no_grad()
    def reduce(self) -> Leaf:
        """Exchange and sum; gives the means over all lanes."""
        if self._group.size == 1:
            return self._tree.mean()
        self.pack()
        if self._device.type != "cuda":
            self._exchange()
        else:
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(self._filled)
                self._exchange()
                self._done.record()
        return self._means

    def arrive(self) -> None:
        """Let what follows on this device wait for the result."""
        if self._group.size > 1 and self._device.type == "cuda":
            torch.cuda.current_stream().wait_event(self._done)

    def _exchange(self) -> None:
        group, rank, size = self._group, self._group.rank, self._slice
        rows = [len(heights) for heights in self._heights]
        if self._staged:
            self._host_send.copy_(self._send, non_blocking=True)
            self._stream.synchronize()
        send = self._host_send if self._staged else self._send
        group.all_to_all(self._received, send, [n * size for n in rows], [rows[rank] * size] * group.size)
        self._sum(self._received.view(-1, size))
        group.all_gather(self._gathered, self._mine)
        if self._result is not self._gathered:
            self._result.copy_(self._gathered, non_blocking=True)

    def _sum(self, rows: Tensor) -> None:
        """This worker's slice of the mean, in the order of the lane tree; one row a subtree."""
        heights = [height for worker in self._heights for height in worker]
        dtype = self._entries[0].like.dtype
        step = _CHUNK if rows.device.type == "cpu" else self._slice
        for first in range(0, self._slice, step):
            tree = LaneTree(wire=self._wire)
            for row, height in zip(rows, heights, strict=True):
                tree.add([row[first : first + step].to(dtype)], height)
            self._mine[first : first + step].copy_(tree.mean()[0])

    def _allocate(self) -> None:
        group, own = self._group, len(self._heights[self._group.rank])
        dtype = self._entries[0].like.dtype
        wire = self._wire or dtype
        length = sum(entry.like.numel() for entry in self._entries)
        self._slice = max(-(-length // group.size), 1)
        whole = self._slice * group.size
        self._staged = group.stages(self._device)
        near = torch.device("cpu") if self._staged else self._device
        self._flat = torch.zeros(whole, dtype=wire, device=self._device)
        self._send = self._flat if own == 1 else torch.zeros(whole * own, dtype=wire, device=self._device)
        total = sum(map(len, self._heights))
        self._received = torch.zeros(total * self._slice, dtype=wire, device=near, pin_memory=self._staged)
        self._mine = torch.zeros(self._slice, dtype=wire, device=near)
        self._gathered = torch.zeros(whole, dtype=wire, device=near, pin_memory=self._staged)
        self._result = self._gathered
        if self._staged or wire != dtype:
            self._result = torch.zeros(whole, dtype=dtype, device=self._device)
        self._slots, self._means = self._views(self._flat), self._views(self._result)
        if self._device.type == "cuda":
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            self._filled, self._done = (torch.cuda.Event() for _ in range(2))  # type: ignore[no-untyped-call]
        if self._staged:
            self._host_send = torch.zeros_like(self._send, device="cpu", pin_memory=True)

    def _views(self, flat: Tensor) -> list[Tensor]:
        """The entries as parts of a flat tensor, lying as the entries do."""
        views, first = [], 0
        for like in (entry.like for entry in self._entries):
            dense = like.is_contiguous() or like.is_contiguous(memory_format=torch.channels_last)
            stride = like.stride() if dense else torch.empty(like.shape, device="meta").stride()
            views.append(flat.as_strided(like.shape, stride, first))
            first += like.numel()
        return views
