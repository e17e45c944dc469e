"""Evaluation of a split, in training and afterwards: by `host_evaluate` or `device/device_evaluate`."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch

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


def place_evaluator(stock: Evaluator, lowering: DeviceLowering | None, graph: bool = True) -> Evaluator:
    """An evaluator on the device if whole steps run there, on a GPU as a CUDA graph; else `stock` itself.

    The user's metrics need the model's outputs, which only `stock` has.
    """
    if lowering is None or stock.metrics:
        return stock
    from lockstep.train.device.device_evaluate import DeviceEvaluator

    own = worker_lanes(stock.run.train.lanes, stock.group.size, stock.group.rank)
    network, load = lowering.eval_network(len(own))
    graph = graph and stock.device.type == "cuda"
    return DeviceEvaluator(**vars(stock), network=network, load=load, graph=graph)


def open_given_data(trained: Trained, data: Any) -> Store:
    """The data set that a script passes for a run; if it passes none, the run's own."""
    if data is None:
        store = open_data(trained.run)
        check_same_data(trained, store)
        return store
    store = from_map_style(data, any_target=not trained.is_classifier)
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
    run, lowering = trained.run, None
    if loss is None and not trained.is_classifier:
        raise ModelError(
            f"{trained.directory} was trained with a loss of your own, over outputs of any shape: give it "
            "to lockstep.evaluate as loss="
        )
    loss = loss or make_loss(trained.run.train)
    loss = loss if trained.is_classifier else WholeLoss(loss)
    with plain_torch():
        prepare_device(trained.device.type, run.train.threads, tf32=run.train.precision == "tf32")
        if trained.identity.get("kernels.set") != "stock" and trained.device.type == "cuda":
            with suppress(ModelError):
                lowering = lower_for_device(
                    run, trained.model, loss, trained.shape, trained.device, trains=False
                )
        stock = Evaluator(run, split, trained.augment, loss, trained.device, metrics=metrics or {})
        return place_evaluator(stock, lowering)(trained.model)
