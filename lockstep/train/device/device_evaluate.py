"""Evaluation on the device, on a GPU as a CUDA graph: how many blocks it takes at once, and their sums.

Fused kernels compute as many blocks in one launch as a worker has lanes, because there a sample's loss does
not depend on its batch. Stock kernels compute one. Order, results and a cursor into them are on the device,
so the host waits only at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from lockstep.comm.tree import tree_sum
from lockstep.data.augment import Augment
from lockstep.data.store import Split
from lockstep.kernels.cuda_graph import capture, run_first
from lockstep.kernels.triton.batch_gather import Move, gather_batch
from lockstep.lower.eval_network import EvalNetwork
from lockstep.train.device.prefetch import place_images
from lockstep.train.evaluation.host_evaluate import Evaluator
from lockstep.train.evaluation.metric import Measured


@dataclass(frozen=True, kw_only=True)
class DeviceEvaluator(Evaluator):
    """Evaluates with a network's own buffers; `load` copies a model's weights into it."""

    network: EvalNetwork
    load: Callable[[nn.Module], None]
    graph: bool

    def measure(self, model: nn.Module, measured: Measured) -> tuple[Tensor, Tensor]:
        self.load(model)
        blocks, compute = self.blocks, self._compute
        blocks.begin()
        for group in range(blocks.groups):
            blocks.images.feed(group)
            compute()
        return blocks.loss.flatten()[: len(self.own)], blocks.right.sum().to(torch.int64)

    @cached_property
    def blocks(self) -> Blocks:
        """This worker's blocks, kept for all evaluations."""
        return Blocks(self.network, self.split, self.augment, self.own, self.device)

    @cached_property
    def _compute(self) -> Callable[[], object]:
        if self.graph:
            run_first(self.blocks.dry_run, self.device, self.group.size > 1)
        return capture(self.blocks.compute, self.device, self.graph)


class Blocks:
    """A worker's blocks, in groups of as many as the network has lanes, and the sums over each block."""

    def __init__(
        self, network: EvalNetwork, split: Split, augment: Augment, own: range, device: torch.device
    ) -> None:
        self._network, self.groups = network, -(-len(own) // network.lanes)
        shape, length = (self.groups, network.lanes), len(split)
        numbers = torch.full(shape, length)  # ids past the end mark blocks and samples that are missing
        numbers.view(-1)[: len(own)] = torch.tensor(own)
        ids = (numbers[..., None] * network.lane_size + torch.arange(network.lane_size)).flatten(1)
        self._missing, self._order = (ids >= length).to(device), ids.clamp(max=length - 1).to(device)
        self.images = place_images(split, self._order, device)
        self._normal = augment.normal(self.images.images)
        self._rows = torch.arange(self.groups, device=device)[:, None]
        self._nothing = torch.zeros(5, dtype=torch.int64, device=device)
        self._cursor = torch.zeros(1, dtype=torch.int64, device=device)
        self.loss, self.right = (torch.zeros(shape, device=device) for _ in range(2))

    def begin(self) -> None:
        """Go back to the first group."""
        self._cursor.zero_()
        self.images.begin_epoch(0)

    def dry_run(self) -> None:
        """Compute the first group, so that every kernel is compiled; can be repeated."""
        self._cursor.zero_()
        self.compute()

    def compute(self) -> None:
        """Gather, forward and sums of the group at the cursor; then advance the cursor."""
        network, nothing = self._network, self._nothing
        gather_batch(
            self.images.images, self.images.labels, self.images.places, self._order, self._cursor,
            nothing[:1], nothing, self._normal, network.x[0], network.labels, Move(), network.pad,
        )  # fmt: skip
        network.forward(training=False)
        network.score()
        missing, here = self._missing.index_select(0, self._cursor)[0], self._rows == self._cursor
        for values, sums in ((network.loss, self.loss), (network.right, self.right)):
            real = values.masked_fill(missing, 0.0)  # torch.where would copy a scalar from the host
            torch.where(here, tree_sum(real.view(-1, network.lane_size).t()), sums, out=sums)
        self._cursor.add_(1)
