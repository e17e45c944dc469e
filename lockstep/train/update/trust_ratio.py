"""Trust ratios of `lars` and `lamb`: the norm of each whole weight over that of its gradient or update.

Norms are summed over chunks of 2¹⁶ elements by trees, as for clipping, so no slice or device changes a bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.comm.tree import tree_sum
from lockstep.spec import Optimizer
from lockstep.spec.rule.optimizer_rule import RULES
from lockstep.train.clip import chunk_sums


@torch.no_grad()
def trust_ratios(optimizer: Optimizer, weights: list[Tensor], others: list[Tensor]) -> Tensor:
    """One for each of `weights`, 1 where a norm is 0; `others` are their gradients, or their updates."""
    norms, by = _norms(weights), _norms(others)
    found, below = norms, by
    if RULES[optimizer.name].whole == "gradient":
        found = norms * optimizer.options["trust"]
        below = by + norms * optimizer.weight_decay + optimizer.options["eps"]
    has_both = (norms > 0) & (by > 0)
    ones = torch.ones_like(found)
    return torch.where(has_both, found / torch.where(has_both, below, ones), ones)


def _norms(tensors: list[Tensor]) -> Tensor:
    squares = torch.stack([tree_sum(chunk_sums(tensor)) for tensor in tensors])
    return squares.double().sqrt().float()
