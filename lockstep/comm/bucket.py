"""A bucket: tensors packed into one flat buffer, with a wire type; also which tensors share one.

A gradient's path: backward → lane tree (local) → bucket → group → lane tree (global) → optimizer. A worker's
lane tree yields one root for each of its maximal aligned subtrees. The exchange computes the mean from the
roots of all workers. With one worker the local tree is the whole tree, and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.comm.exchange import ExchangeShape, make_exchange
from lockstep.comm.group import Group
from lockstep.comm.tree import LaneTree, Leaf, all_heights, worker_lanes
from lockstep.spec.rule.bucket_cut import cut_buckets


@dataclass(frozen=True)
class ReducedTensor:
    """Describes a tensor that is reduced in every step: an example, another wire type, a name."""

    like: Tensor
    wire: torch.dtype | None = None
    name: str = ""  # of a parameter, by which compression remembers

    @property
    def num_bytes(self) -> int:
        return self.like.numel() * self.like.element_size()

    def kind(self) -> tuple[Hashable, ...]:
        """What entries must have in common to share a bucket."""
        return self.like.dtype, self.like.device, self.wire


def split(entries: Sequence[ReducedTensor], bucket_bytes: float) -> list[list[int]]:
    """The indices of each bucket's entries: neighbours of one kind, up to `bucket_bytes` together."""
    return cut_buckets([entry.num_bytes for entry in entries], [e.kind() for e in entries], bucket_bytes)


class Bucket:
    """Entries that are reduced together: their lane tree, and the exchange that gives the mean."""

    def __init__(self, group: Group, lanes: int, entries: list[ReducedTensor], indices: list[int]) -> None:
        self.indices, self._entries = indices, entries
        self.leaf: dict[int, Tensor] = {}
        self._own = worker_lanes(lanes, group.size, group.rank)
        self._alone, self._device = group.size == 1, entries[0].like.device
        self._on_gpu = self._device.type == "cuda"
        self.sent_bytes = 0  # to other workers in the last step, as if none were on this host
        self.begin()
        if self._alone:
            return
        self._prepare(group, lanes)
        if self._on_gpu:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            self._filled, self._done = torch.cuda.Event(), torch.cuda.Event()  # type: ignore[no-untyped-call]

    def _prepare(self, group: Group, lanes: int) -> None:
        """Make the exchange and its buffers, which stay."""
        like = self._entries[0].like
        length = sum(entry.like.numel() for entry in self._entries)
        shape = ExchangeShape(
            all_heights(lanes, group.size), length, like.dtype, self._entries[0].wire, like.device
        )
        self._exchange = make_exchange(group, shape)
        size = torch.empty((), dtype=shape.travels_as).element_size()
        self.sent_bytes = (len(shape.heights[group.rank]) + 1) * (group.size - 1) * shape.slice * size
        self._slots = [self._views(root) for root in self._exchange.roots]
        self._means = self._views(self._exchange.result)

    def begin(self) -> None:
        """Start a step."""
        self.leaf.clear()
        self.watched: int | None = None  # for an audit: the worker whose slice is summed twice
        self._tree, self._left = LaneTree(self._own.start, self._entries[0].wire), len(self._own)

    @property
    def num_lanes(self) -> int:
        """How many of this worker's lanes are summed so far."""
        return len(self._own) - self._left

    def is_whole(self) -> bool:
        """Whether all of this worker's lanes are summed."""
        return not self._left

    def rest_height(self) -> int:
        """The height of the subtree that consists of all lanes still missing."""
        return self._left.bit_length() - 1

    def add_leaf(self, height: int) -> None:
        """Add the collected tensors of a lane, or of a subtree of this height, to the tree."""
        self._tree.add([self.leaf[place] for place in range(len(self.indices))], height)
        self._left -= 1 << height
        self.leaf.clear()

    @torch.no_grad()
    def pack(self) -> None:
        """Copy the roots to the buffers of the exchange."""
        if self._alone:
            return
        for slots, (_, _, tensors) in zip(self._slots, self._tree.roots(), strict=True):
            torch._foreach_copy_(slots, tensors)
        if self.watched is not None:
            self._kept = self._exchange.slice_roots(self.watched)
        self._mark_filled()

    def _mark_filled(self) -> None:
        if self._on_gpu:
            self._filled.record(torch.cuda.current_stream(self._device))

    @torch.no_grad()
    def reduce(self) -> Leaf:
        """The means over all lanes of all workers, after `pack`."""
        if self._alone:
            return self._tree.mean()
        if not self._on_gpu:
            return self._exchange_means()
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._filled)
            found = self._exchange_means()
            self._done.record(self._stream)
        return found

    def _exchange_means(self) -> Leaf:
        self._exchange.run()
        return self._means

    def find_slice(self, group: Group) -> tuple[int, Tensor, Tensor]:
        """The watched slice: its owner, the means that arrived, and the means summed again from all roots."""
        assert self.watched is not None
        rows, like = group.all_gather_bytes(self._kept.view(torch.uint8).numpy().tobytes()), self._kept
        roots = [torch.frombuffer(bytearray(row), dtype=like.dtype).view(-1, like.shape[1]) for row in rows]
        arrived = self._exchange.slice_result(self.watched)
        return self.watched, arrived, self._exchange.sum_slice(roots)

    def arrive(self) -> None:
        """Make later kernels of the current CUDA stream wait for the result."""
        if not self._alone and self._on_gpu:
            torch.cuda.current_stream(self._device).wait_event(self._done)

    def _views(self, flat: Tensor) -> list[Tensor]:
        """Views into a flat tensor, one for each entry, with the entry's shape and memory format."""
        views, first = [], flat.storage_offset()
        for like in (entry.like for entry in self._entries):
            dense = like.is_contiguous() or like.is_contiguous(memory_format=torch.channels_last)
            stride = like.stride() if dense else torch.empty(like.shape, device="meta").stride()
            views.append(flat.as_strided(like.shape, stride, first))
            first += like.numel()
        return views
