"""Loss functions: each is a mean over the samples of a lane; auxiliary heads are added by their weight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from lockstep.kernels.structure import as_float
from lockstep.spec import Train

Loss = Callable[[Any, Any], Tensor]  # of outputs and targets; for a classifier, of logits and labels
WHOLE_SHARE = 1024  # of a sample in mixed labels [N, 3]: its label, its partner's, and its share


def make_loss(train: Train) -> Loss:
    """The loss that a Run names."""
    if train.loss == "squared_error":
        return squared_error
    return CrossEntropy(train.label_smoothing)


@dataclass(frozen=True)
class CrossEntropy:
    """Softmax cross-entropy; kernels that fuse it know it by its type."""

    smoothing: float = 0.0

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels, label_smoothing=self.smoothing)


@dataclass(frozen=True)
class WholeLoss:
    """A user's loss over all that a model gives, where that is not one logit for each class."""

    function: Loss

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        return self.function(as_float(outputs), targets)


def squared_error(logits: Tensor, labels: Tensor) -> Tensor:
    """Softmax, then the squared distance to the one-hot label."""
    target = F.one_hot(labels, logits.shape[1]).to(logits.dtype)
    return (logits.softmax(1) - target).square().sum(1).mean()


def label_loss(loss: Loss, logits: Tensor, labels: Tensor) -> Tensor:
    """The loss for labels [N]; for mixed ones [N, 3], those of both labels by the lane's share."""
    if labels.dim() == 1:
        return loss(logits, labels)
    own, partner, share = labels.unbind(1)
    weight = share[0].float() / WHOLE_SHARE
    return loss(logits, own) * weight + loss(logits, partner) * (1 - weight)


def main_labels(labels: Tensor) -> Tensor:
    """Labels [N], of mixed ones those with the larger share."""
    if labels.dim() == 1:
        return labels
    own, partner, share = labels.unbind(1)
    return own.where(2 * share >= WHOLE_SHARE, partner)


def heads_loss(loss: Loss, outputs: Any, labels: Any, aux_weight: float) -> Tensor:
    """The main head's loss, plus `aux_weight` times the loss of each auxiliary head."""
    if isinstance(loss, WholeLoss):
        return loss(outputs, labels)
    if not isinstance(outputs, tuple):
        return label_loss(loss, outputs.float(), labels)
    total = label_loss(loss, outputs[0].float(), labels)
    for output in outputs[1:]:
        total = total + aux_weight * label_loss(loss, output.float(), labels)
    return total
