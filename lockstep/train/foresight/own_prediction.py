"""Predicts the steps of a run on the machine that it runs on, if that was probed."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

from torch import nn

from lockstep.kernels.numerics import plain_torch
from lockstep.measure.layer_count import count_layers, list_buffers, list_weights
from lockstep.measure.probe_device import name_device
from lockstep.models import build_model
from lockstep.planner.cost import predict
from lockstep.planner.deal_work import deal_work
from lockstep.planner.memory import worker_memory
from lockstep.planner.remembered import recall_cluster, recall_profile
from lockstep.spec.plan import Plan
from lockstep.spec.profile import Profile
from lockstep.spec.run import Run
from lockstep.train.setup import Setup

Shape = tuple[int, int, int]


def predict_own(setup: Setup, plan: Plan) -> tuple[dict[str, float], str]:
    """Seconds of a step's parts under a plan whose `data` is filled in, and from what; empty if not known."""
    try:
        return _predict(setup, plan)
    except Exception:  # more nodes than were probed, a spoilt file, a user's module: no reason to lose a run
        return {}, ""


def predict_memory(setup: Setup, plan: Plan) -> float:
    """Bytes of the busiest worker, for weights, gradients, optimizer and activations; 0 if not known."""
    try:
        profile = _find_profile(setup)
        return 1e9 * worker_memory(setup.run, profile, plan, bool(setup.lowering)).total_gb
    except Exception:  # a user's module that cannot be counted
        return 0.0


def _predict(setup: Setup, plan: Plan) -> tuple[dict[str, float], str]:
    cluster = recall_cluster(name_device(setup.device))
    if not cluster:
        return {}, ""
    profile = _find_profile(setup)
    source = "the probe, and a profile of this run" if profile.device else "the probe, layers counted: rough"
    return predict(deal_work(setup.run, profile, cluster, plan)).segments(), source


def _find_profile(setup: Setup) -> Profile:
    """The profile that was measured of this run on this machine; else its layers, counted."""
    run, store = setup.run, setup.store
    sizes = len(store.classes), len(store.train)
    if setup.is_own_model:  # which the run does not name
        return _count(run, deepcopy(setup.model).cpu(), store.shape, *sizes)
    known = recall_profile(run, store.shape, name_device(setup.device))
    return known or count_profile(run, store.shape, *sizes)


def count_profile(run: Run, shape: Shape, classes: int, images: int) -> Profile:
    """What the layers of a run's model compute and hold, without seconds."""
    with plain_torch():
        model = build_model(replace(run, model=replace(run.model, weights=None)), shape, classes)
    return _count(run, model, shape, classes, images)


def _count(run: Run, model: nn.Module, shape: Shape, classes: int, images: int) -> Profile:
    with plain_torch():
        layers = count_layers(model, shape)
    return Profile(
        model=run.model.name,
        shape=shape,
        classes=classes,
        precision=run.train.precision,
        kernels=run.kernels.set,
        layers=tuple(layers),
        train_images=images,
        weights=list_weights(model),
        buffers=list_buffers(model),
        how={"layers": "counted, not measured"},
    )
