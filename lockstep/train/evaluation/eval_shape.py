"""Evaluation at a size of its own (`data.eval_size`): whether a model takes it, and its kernels there."""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import Tensor, nn

from lockstep.data import Store
from lockstep.errors import ModelError
from lockstep.kernels.loss import Loss, WholeLoss
from lockstep.lower.choose import lower_for_device
from lockstep.lower.program import DeviceLowering
from lockstep.models.tensors import buffers_kept
from lockstep.spec import Run


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
