"""Evaluation with fused kernels: as many blocks in one launch as a step has lanes.

A sample's loss does not depend on the batch it is in, so it does not matter which blocks go together.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lockstep.comm.tree import tree_sum
from lockstep.kernels.device.flat import KernelNetwork
from lockstep.kernels.device.gather import Move, gather
from lockstep.train.device_lanes import Form, load
from lockstep.train.evaluate import Evaluator


@dataclass(frozen=True, kw_only=True)
class FusedEvaluator(Evaluator):
    """Evaluates on the buffers of a network, whose weights it replaces by the model's."""

    form: Form
    network: KernelNetwork

    def measure(self, model: nn.Module, own: range) -> tuple[Tensor, Tensor]:
        network = self.network
        load(self.form, network, model)
        losses, rights = [], []
        for start in range(0, len(own), network.lanes):
            ids, real = self._ids(own[start : start + network.lanes])
            self._fill(ids)
            network.forward(training=False)
            network.score()
            losses.append(self._sums(network.loss, real))
            rights.append(self._sums(network.right, real))
        return torch.cat(losses)[: len(own)], torch.cat(rights).sum().to(torch.int64)

    def _ids(self, blocks: range) -> tuple[Tensor, Tensor]:
        """The samples of some blocks, and which are real: others stand in for those that are missing."""
        numbers = torch.tensor([*blocks, *[len(self.split)] * (self.network.lanes - len(blocks))])
        ids = (numbers[:, None] * self.block + torch.arange(self.block)).flatten()
        return ids.clamp(max=len(self.split) - 1), ids < len(self.split)

    def _fill(self, ids: Tensor) -> None:
        """Images and labels to where the kernels read them."""
        network, device = self.network, self.device
        images, labels = (tensor.contiguous().to(device) for tensor in self.split.read(ids))
        order = torch.arange(len(ids), device=device)
        nothing = torch.zeros(5, dtype=torch.int64, device=device)
        gather(
            images, labels, order, order, nothing[:1], nothing[:1], nothing, self.augment.normal(images),
            network.x[0], network.labels, Move(), network.pad,
        )  # fmt: skip

    def _sums(self, values: Tensor, real: Tensor) -> Tensor:
        """Sums over the real samples of each block, by a tree."""
        masked = torch.where(real.to(self.device), values, 0.0)
        return tree_sum(masked.view(-1, self.block).t())
