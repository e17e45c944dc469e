"""The lane tree over a process group of the user's own: all-reduce, reduce-scatter and all-gather by lanes.

The result does not depend on the number of workers: each element goes through the additions of one fixed
tree over all lanes, whoever holds them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm.exchange import ExchangeShape, exchange_over
from lockstep.comm.group import Group
from lockstep.comm.transport import TorchTransport
from lockstep.comm.tree import LaneTree, all_heights, subtrees, worker_lanes
from lockstep.errors import SpecError


class TreeReduce:
    """Means over the lanes of all workers, for tensors of the shape and type of `like`.

    `group` is a process group of `torch.distributed`, by default the whole world; without one this process is
    the only worker. Every worker makes it and calls it in the same order.
    """

    def __init__(self, like: Tensor, lanes: int, group: Any = None) -> None:
        if group is None and dist.is_initialized():
            group = dist.group.WORLD
        self._group = Group()
        if group is not None and group.size() > 1:
            transport = TorchTransport.of_script(group)
            on_gpu = transport if transport.name == "nccl" else None
            self._group = Group(group.rank(), group.size(), transport, on_gpu)
        if not 0 < self._group.size <= lanes or lanes & (lanes - 1):
            raise SpecError(
                f"lanes={lanes} must be a power of two, and at least the {self._group.size} workers: every "
                "worker needs a lane of its own"
            )
        self.own = worker_lanes(lanes, self._group.size, self._group.rank)  # this worker's lanes
        heights = all_heights(lanes, self._group.size)
        self._shape, self._like = ExchangeShape(heights, like.numel(), like.dtype, None, like.device), like
        self._exchange = exchange_over(self._group, self._shape)

    def all_reduce(self, parts: Sequence[Tensor]) -> Tensor:
        """The mean over all lanes; `parts` are the tensors of this worker's lanes, in order."""
        self._fill(parts)
        self._exchange.run()
        return self._exchange.result[: self._like.numel()].view(self._like.shape).clone()

    def reduce_scatter(self, parts: Sequence[Tensor]) -> Tensor:
        """This worker's slice of the mean, flat; slices are equally long, the last ones filled with zeros."""
        self._fill(parts)
        return self._exchange.reduce_scatter().clone()

    def all_gather(self, part: Tensor) -> Tensor:
        """The whole tensor from the slices of all workers."""
        found = torch.empty(self._shape.whole, dtype=part.dtype, device=part.device)
        self._group.all_gather(found, part)
        return found[: self._like.numel()].view(self._like.shape)

    @torch.no_grad()
    def _fill(self, parts: Sequence[Tensor]) -> None:
        if len(parts) != len(self.own):
            raise SpecError(f"{len(parts)} tensors for the {len(self.own)} lanes {self.own} of this worker")
        tree, starts = LaneTree(self.own.start), [first for first, _ in subtrees(self.own)]
        roots = dict(zip(starts, self._exchange.roots, strict=True))
        for lane, part in zip(self.own, parts, strict=True):
            flat = part.detach().reshape(-1)
            # the tree sums into a subtree's first lane: that copy is its root
            tree.add([roots[lane][: len(flat)].copy_(flat) if lane in roots else flat.clone()])
