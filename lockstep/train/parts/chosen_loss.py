"""Which loss a run trains with: its own or a script's; whether model, targets and loss go together."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lockstep.data import Store
from lockstep.data.class_labels import balanced_weights
from lockstep.errors import ModelError
from lockstep.kernels.loss import Loss, WholeLoss, make_loss
from lockstep.kernels.structure import describe
from lockstep.models.tensors import buffers_kept
from lockstep.spec import Train
from lockstep.spec.rule.loss_rule import LOSSES, read_weights


def choose_loss(
    model: nn.Module, loss: Loss | None, store: Store, train: Train, device: torch.device
) -> Loss:
    """The loss to train with; one image goes through the model, so that one that does not fit is refused.

    A loss of the user's takes outputs of any shape. Where they are not one logit for each class, nothing can
    be counted correct, and a `WholeLoss` says so.
    """
    output = _try_image(model, store, device)
    wanted = (1, len(store.classes))
    if isinstance(output, Tensor) and tuple(output.shape) == wanted and store.classes:
        if loss is None:
            return _own_loss(store, train)
        if not store.has_values:
            _check_unweighted(train)
            return loss
    if loss:
        _check_unweighted(train)
        return WholeLoss(loss)
    what = "values" if store.has_values else "classes"
    raise ModelError(
        f"the model gives {_shape(output)} for one image in eval mode; {store.name} has "
        f"{len(store.classes)} {what}, so it must give {wanted}; any other output needs a loss of yours"
    )


def explain_no_accuracy(model: nn.Module, loss: Loss, store: Store, device: torch.device) -> list[str]:
    """A warning if there are classes and yet no accuracy, which may be a mistake."""
    if not store.classes or store.has_values or not isinstance(loss, WholeLoss):
        return []
    return [
        f"the model gives {_shape(_try_image(model, store, device))} for one image, not one logit for each "
        f"of the {len(store.classes)} classes of {store.name}: there is no accuracy, only the loss"
    ]


def _own_loss(store: Store, train: Train) -> Loss:
    """The loss that the Run names, if it is for the targets of the data."""
    if store.has_values != (train.targets != "classes"):
        kinds = ("labels", "numbers") if store.has_values else ("classes",)
        fits = " or ".join(name for name, kind in LOSSES.items() if kind in kinds)
        what = "a row of values for each image" if store.has_values else "one class for each image"
        raise ModelError(f"train.loss={train.loss}: {store.name} has {what}: use {fits}")
    if train.targets == "labels":
        _check_labels(store)
    weights = (
        balanced_weights(store) if train.class_weights == "balanced" else read_weights(train.class_weights)
    )
    if weights and len(weights) != len(store.classes):
        raise ModelError(
            f"train.class_weights={train.class_weights}: {len(weights)} numbers, and {store.name} has "
            f"{len(store.classes)} classes: give one for each, in the order of {_list(store.classes)}"
        )
    return make_loss(train, weights)


def _check_labels(store: Store) -> None:
    """Refuse labels that are neither there nor not, nor between; of a user's data set, only the first."""
    known = getattr(store.train, "labels", None)
    if not isinstance(known, Tensor):
        known = store.train.read(torch.arange(1))[1]
    bad = torch.nonzero((known < 0) | (known > 1))
    if len(bad):
        row, column = bad[0].tolist()[0], bad[0].tolist()[-1]
        raise ModelError(
            f"train.loss=binary_cross_entropy: {store.name} has {float(known[row].flatten()[column]):g} as "
            f"'{store.classes[column]}': labels are 0 or 1; for numbers, use mse, l1 or huber"
        )


def _check_unweighted(train: Train) -> None:
    if train.class_weights != "none":
        raise ModelError(
            f"train.class_weights={train.class_weights}: not with a loss of your own, which can weigh "
            "classes itself: set class_weights=none"
        )


def _list(names: tuple[str, ...], most: int = 5) -> str:
    return ", ".join(names[:most]) + (", …" if len(names) > most else "")


@torch.no_grad()
def _try_image(model: nn.Module, store: Store, device: torch.device) -> Any:
    model.eval()
    try:
        with buffers_kept(model):
            return model(torch.zeros(1, *store.shape, device=device))
    except (RuntimeError, TypeError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise ModelError(
            f"the model does not take images of shape {store.shape} (C, H, W): {first}"
        ) from None


def _shape(output: Any) -> str:
    return str(tuple(output.shape)) if isinstance(output, Tensor) else describe(output)
