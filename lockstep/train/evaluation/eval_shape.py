"""Images of several sizes (`data.eval_size`, `data.sizes`): whether a model takes them, and its kernels."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor, nn

from lockstep.data import Store
from lockstep.errors import DataError, ModelError
from lockstep.kernels.loss import Loss, WholeLoss
from lockstep.lower.choose import lower_for_device
from lockstep.lower.program import DeviceLowering
from lockstep.models.tensors import buffers_kept
from lockstep.spec import Run
from lockstep.train.preflight import check_lane


@torch.no_grad()
def check_eval_shape(model: nn.Module, loss: Loss, store: Store, device: torch.device) -> None:
    """Refuse a size for evaluation that the model does not take, or for which it gives other outputs."""
    if store.eval_shape == store.shape:
        return
    model.eval()
    try:
        with buffers_kept(model):
            output = model(torch.zeros(1, *store.eval_shape, device=device))
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise _refuse(store, first) from None
    found = tuple(output.shape) if isinstance(output, Tensor) else ()
    if not isinstance(loss, WholeLoss) and found != (1, len(store.classes)):
        raise _refuse(store, f"it gives {found}, not {(1, len(store.classes))}")


def check_sizes(model: nn.Module, loss: Loss, store: Store, run: Run, device: torch.device) -> None:
    """Refuse sizes of training images that the model does not take, or that no epoch has."""
    if not store.sizes:
        return
    key, last = f"data.sizes={run.data.options['sizes']}", store.sizes[-1]
    if last[0] >= run.train.epochs:
        raise DataError(
            f"{key}: {last[1]}@{last[0]} begins after the last epoch, as train.epochs={run.train.epochs} and "
            "epochs count from 0: raise train.epochs, or let it begin earlier"
        )
    if run.train.bands > 1 or run.train.slices > 1:
        raise ModelError(f"{key}: not with train.bands or train.slices, whose grid is for images of one size")
    for shape in store.train_shapes:
        try:
            check_lane(model, loss, replace(store, shape=shape, sizes=()), run, device)
        except ModelError as error:
            raise ModelError(
                f"{key}: the model, built for {store.shape[1]}x{store.shape[2]}, does not train on "
                f"{shape[1]}x{shape[2]}: {error}; take one that ends in global pooling, as a resnet"
            ) from None


def _refuse(store: Store, reason: str) -> ModelError:
    height, width = store.shape[1:]
    return ModelError(
        f"data.eval_size={store.eval_size}: the model is built for images of {height}x{width} and does not "
        f"take others: {reason}; take one that ends in global pooling, as a resnet, or leave data.eval_size "
        "out"
    )


def lower_for_evaluation(
    run: Run, model: nn.Module, loss: Loss, store: Store, lowering: DeviceLowering | None
) -> DeviceLowering | None:
    """How whole evaluations run on the device: as training does, with kernels for their own size."""
    if lowering is None or store.eval_shape == store.shape:
        return lowering
    with suppress(ModelError):
        return lower_for_device(run, model, loss, store.eval_shape, lowering.device, trains=False)
    return None
