"""Predicts the steps of a run on the machine that it runs on, if that was probed."""

from __future__ import annotations

from dataclasses import replace

from lockstep.errors import LockstepError
from lockstep.kernels.numerics import plain_torch
from lockstep.measure.layer_count import count_layers
from lockstep.measure.probe_device import name_device
from lockstep.models import build_model
from lockstep.planner.cost import predict
from lockstep.planner.deal_work import deal_work
from lockstep.planner.remembered import recall_cluster, recall_profile
from lockstep.spec.plan import Plan
from lockstep.spec.profile import Profile
from lockstep.spec.run import Run
from lockstep.train.setup import Setup


def predict_own(setup: Setup, plan: Plan) -> dict[str, float]:
    """Seconds of a step's parts under a plan whose `data` is filled in; empty if nothing is known here."""
    device, shape = name_device(setup.device), setup.store.shape
    cluster = recall_cluster(device)
    if not cluster:
        return {}
    profile = recall_profile(setup.run, shape, device)
    try:
        profile = profile or count_profile(setup.run, shape, len(setup.store.classes), len(setup.store.train))
        return predict(deal_work(setup.run, profile, cluster, plan)).segments()
    except LockstepError:  # more nodes than were probed, or a model that cannot be built again
        return {}


def count_profile(run: Run, shape: tuple[int, int, int], classes: int, images: int) -> Profile:
    """What the layers of a run's model compute and hold, without seconds."""
    with plain_torch():
        model = build_model(replace(run, model=replace(run.model, weights=None)), shape, classes)
        layers = count_layers(model, shape)
    return Profile(
        model=run.model.name,
        shape=shape,
        classes=classes,
        precision=run.train.precision,
        kernels=run.kernels.set,
        layers=tuple(layers),
        train_images=images,
        how={"layers": "counted, not measured"},
    )
