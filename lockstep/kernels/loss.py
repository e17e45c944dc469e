"""Loss functions: each is a mean over the samples of a lane; auxiliary heads are added by their weight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.kernels.structure import as_float
from lockstep.spec import Train

Loss = Callable[[Any, Any], Tensor]  # of outputs and targets; for a classifier, of logits and labels
WHOLE_SHARE = 1024  # of a sample in mixed labels [N, 3]: its label, its partner's, and its share


def make_loss(train: Train, class_weights: tuple[float, ...] | None = None) -> Loss:
    """The loss that a Run names; without `class_weights`, every class counts as much."""
    if train.loss in _OF_VALUES:
        return ValueLoss(_OF_VALUES[train.loss])
    if train.loss == "squared_error":
        return squared_error
    if class_weights is not None:
        return WeightedCrossEntropy(class_weights, train.label_smoothing)
    return CrossEntropy(train.label_smoothing)


@dataclass(frozen=True)
class CrossEntropy:
    """Softmax cross-entropy; kernels that fuse it know it by its type."""

    smoothing: float = 0.0

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels, label_smoothing=self.smoothing)


@dataclass(frozen=True)
class WeightedCrossEntropy:
    """Softmax cross-entropy, each sample times the weight of its class; the mean is over samples.

    So a lane counts as much as any other, whatever classes are in it.
    """

    weights: tuple[float, ...]
    smoothing: float = 0.0

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        weights = torch.tensor(self.weights, device=logits.device)
        losses = F.cross_entropy(logits, labels, reduction="none", label_smoothing=self.smoothing)
        return (losses * weights[labels]).mean()


@dataclass(frozen=True)
class WholeLoss:
    """A user's loss over all that a model gives, where that is not one logit for each class."""

    function: Loss

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        return self.function(as_float(outputs), targets)


@dataclass(frozen=True)
class ValueLoss(WholeLoss):
    """A loss over labels that are each there or not, or over numbers: one output for each of them."""

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        return self.function(outputs.float(), targets.float().view_as(outputs))


_OF_VALUES: dict[str, Loss] = {
    "binary_cross_entropy": F.binary_cross_entropy_with_logits,
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "huber": F.huber_loss,
}


def plain_loss(loss: Loss) -> Loss:
    """The loss to evaluate with: without weights of classes, so that runs can be compared."""
    return CrossEntropy(loss.smoothing) if isinstance(loss, WeightedCrossEntropy) else loss


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
    is_of_values = isinstance(loss, ValueLoss)
    if isinstance(loss, WholeLoss) and not is_of_values:
        return loss(outputs, labels)
    find = loss if is_of_values else partial(label_loss, loss)
    if not isinstance(outputs, tuple):
        return find(outputs.float(), labels)
    total = find(outputs[0].float(), labels)
    for output in outputs[1:]:
        total = total + aux_weight * find(output.float(), labels)
    return total
