"""Evaluation of a split, in training and afterwards: by `host_evaluate` or `device/device_evaluate`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from lockstep.comm.group import Group
from lockstep.comm.tree import worker_lanes
from lockstep.data import Split, Store, open_data
from lockstep.data.map_style import from_map_style
from lockstep.errors import DataError, ModelError
from lockstep.kernels.loss import Loss, WholeLoss, make_loss
from lockstep.kernels.numerics import plain_torch, prepare_device
from lockstep.lower.choose import lower_for_device
from lockstep.lower.program import DeviceLowering
from lockstep.runs.trained_run import Trained, check_same_data
from lockstep.train.evaluation.host_evaluate import Evaluation, Evaluator
from lockstep.train.evaluation.metric import Metrics
from lockstep.train.evaluation.named_metric import named_metrics


def place_evaluator(stock: Evaluator, lowering: DeviceLowering | None, graph: bool = True) -> Evaluator:
    """An evaluator on the device if whole steps run there, on a GPU as a CUDA graph; else `stock` itself.

    Metrics need the model's outputs, which only `stock` has.
    """
    if lowering is None or stock.metrics:
        return stock
    from lockstep.train.device.device_evaluate import DeviceEvaluator

    own = worker_lanes(stock.run.train.lanes, stock.group.size, stock.group.rank)
    network, load = lowering.eval_network(max(len(own), 1))  # workers of a lane evaluate, too
    graph = graph and stock.device.type == "cuda"
    return DeviceEvaluator(**vars(stock), network=network, load=load, graph=graph)


def open_given_data(trained: Trained, data: Any) -> Store:
    """The data set that a script passes for a run; if it passes none, the run's own."""
    if data is None:
        store = open_data(trained.run)
        if warning := check_same_data(trained, store):
            warnings.warn(warning, stacklevel=2)
        return store
    values = trained.has_values
    store = from_map_style(data, any_target=not trained.is_classifier, values=values)
    if store.shape != trained.shape or len(store.classes) > len(trained.classes):
        raise DataError(
            f"data: {store.name} has images {store.shape} (C, H, W) and {len(store.classes)} classes, and "
            f"{trained.directory} was trained on {trained.shape} and {len(trained.classes)}: they must match"
        )
    floats = store.test.read(torch.zeros(1, dtype=torch.int64))[0].is_floating_point()
    if floats != trained.takes_floats:
        kinds = ("floats", "uint8") if floats else ("uint8", "floats")
        raise DataError(f"data: images of {store.name} are {kinds[0]}, and the run was trained on {kinds[1]}")
    return store


def evaluate_trained(
    trained: Trained, split: Split, loss: Loss | None = None, metrics: Metrics | None = None
) -> Evaluation:
    """Loss, accuracy and metrics of a trained run; on the device if it trained there and this device can."""
    loss = find_loss(trained, loss)
    with prepared(trained):
        return place_evaluator(stock_evaluator(trained, split, loss, metrics), lower_trained(trained, loss))(
            trained.model
        )


def find_loss(trained: Trained, loss: Loss | None) -> Loss:
    """The loss to evaluate with: a script's own, or the one that the Run names."""
    if loss is None and not (trained.is_classifier or trained.has_values):
        raise ModelError(
            f"{trained.directory} was trained with a loss of your own, over outputs of any shape: give it "
            "to lockstep.evaluate as loss="
        )
    loss = loss or make_loss(trained.run.train)
    return loss if trained.is_classifier or isinstance(loss, WholeLoss) else WholeLoss(loss)


def stock_evaluator(
    trained: Trained, split: Split, loss: Loss, metrics: Metrics | None, group: Group | None = None
) -> Evaluator:
    """Evaluation through the host."""
    device, group = trained.device, group or Group()
    every = {**named_metrics(trained.run), **(metrics or {})}
    return Evaluator(trained.run, split, trained.augment, loss, device, group, every)


def lower_trained(trained: Trained, loss: Loss) -> DeviceLowering | None:
    """How the run is evaluated on a GPU, if it trained with fused or compiled kernels and this GPU can."""
    if trained.identity.get("kernels.set") == "stock" or trained.device.type != "cuda":
        return None
    with suppress(ModelError):
        return lower_for_device(trained.run, trained.model, loss, trained.shape, trained.device, trains=False)
    return None


@contextmanager
def prepared(trained: Trained) -> Iterator[None]:
    """Torch's settings as the run asks for them; the caller's after the block."""
    run, device = trained.run, trained.device
    with plain_torch():
        prepare_device(device.type, run.train.threads, device.index, tf32=run.train.precision == "tf32")
        yield
