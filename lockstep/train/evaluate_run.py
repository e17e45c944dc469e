"""Evaluation of a run, while it trains and afterwards: on the device where its steps run there."""

from __future__ import annotations

from contextlib import suppress

from lockstep.comm.tree import worker_lanes
from lockstep.data import Split
from lockstep.errors import ModelError
from lockstep.kernels.loss import make_loss
from lockstep.kernels.numerics import plain_torch, prepare_device
from lockstep.lower.choose import lower_for_device
from lockstep.lower.program import DeviceLowering
from lockstep.runs.trained_run import Trained
from lockstep.train.evaluate import Evaluation, Evaluator


def place_evaluator(stock: Evaluator, lowering: DeviceLowering | None, graph: bool = True) -> Evaluator:
    """Evaluation on the device where whole steps run there, on a GPU as a CUDA graph; else `stock` itself."""
    if lowering is None:
        return stock
    from lockstep.train.device.device_evaluate import DeviceEvaluator

    own = worker_lanes(stock.run.train.lanes, stock.group.size, stock.group.rank)
    network, load = lowering.eval_network(len(own))
    graph = graph and stock.device.type == "cuda"
    return DeviceEvaluator(**vars(stock), network=network, load=load, graph=graph)


def evaluate_trained(trained: Trained, split: Split) -> Evaluation:
    """Loss and accuracy of a trained run; on the device if it trained there and can here."""
    run, loss, lowering = trained.run, make_loss(trained.run.train), None
    with plain_torch():
        prepare_device(trained.device.type, run.train.threads, tf32=run.train.precision == "tf32")
        if trained.identity.get("kernels.set") != "stock" and trained.device.type == "cuda":
            with suppress(ModelError):
                lowering = lower_for_device(
                    run, trained.model, loss, trained.shape, trained.device, trains=False
                )
        stock = Evaluator(run, split, trained.augment, loss, trained.device)
        return place_evaluator(stock, lowering)(trained.model)
