"""How much memory a worker of a plan needs: weights, gradients, the optimizer's state, activations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from lockstep.planner.compress.bucket_seconds import base_name, find_weights
from lockstep.spec.plan import Plan
from lockstep.spec.profile import LayerProfile, Profile
from lockstep.spec.rule.compression import read_compression
from lockstep.spec.rule.optimizer_rule import RULES
from lockstep.spec.run import Run

_VALUE = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class WorkerMemory:
    """Gigabytes of the worker that needs the most."""

    weights_gb: float
    gradients_gb: float
    optimizer_gb: float
    activations_gb: float
    feedback_gb: float = 0.0  # what compression left out, and as much again within a step

    @property
    def total_gb(self) -> float:
        kept = self.weights_gb + self.gradients_gb + self.optimizer_gb + self.feedback_gb
        return kept + self.activations_gb


def worker_memory(run: Run, profile: Profile, plan: Plan, at_once: bool) -> WorkerMemory:
    """Of the busiest worker; `at_once`: all its lanes are computed together, as kernels on a GPU do."""
    lanes, steps = -(-run.train.lanes // plan.data), run.train.local_steps
    at_once = at_once and steps == 1
    images = run.train.batch // run.train.lanes
    values = 4e-9 * profile.parameters / plan.pipeline
    trained = values  # of several stages the last may have all that is trained
    if plan.pipeline == 1:
        trained = 4e-9 * sum(each.values for each in find_weights(profile))
    layers = _trained_layers(profile) if plan.pipeline == 1 else profile.layers
    shares = plan.data // plan.replicas if plan.shard != "none" else 1
    kept = 1 / shares if plan.shard == "parameters" else 1.0
    waiting = lanes.bit_length() if not at_once else 1  # sums of gradients that wait for other lanes
    waiting += 3 * (steps > 1)  # a lane's sum over a round, the weights that it goes back to, and its move
    states = len(RULES[run.optimizer.name].memory) + (run.train.ema > 0)
    in_flight = min(plan.pipeline, lanes) if plan.schedule == "1f1b" else lanes
    in_flight = lanes if at_once else in_flight if plan.pipeline > 1 else 1
    width = _VALUE[profile.precision]
    activations = sum(map(kept_values, layers)) * width * images * in_flight / plan.pipeline
    if steps > 1:  # the images of a round, twice while its batches are joined
        activations += 8.0 * prod(profile.shape) * images * lanes * steps
    return WorkerMemory(
        weights_gb=values * kept,
        gradients_gb=trained * (waiting / shares if plan.shards_gradients else waiting),
        optimizer_gb=trained * states / shares,
        activations_gb=1e-9 * activations / plan.cells,
        feedback_gb=2e-9 * _feedback_bytes(run, profile, plan),
    )


def _trained_layers(profile: Profile) -> Sequence[LayerProfile]:
    """Those from the first on that has a trained parameter: what is frozen before it keeps nothing."""
    owners = {each.name.rpartition(".")[0] for each in find_weights(profile)}
    inner = tuple(f"{owner}." for owner in owners)
    names = [base_name(layer) for layer in profile.layers]
    kept = (place for place, name in enumerate(names) if name in owners or name.startswith(inner))
    return profile.layers[0 if "" in owners else next(kept, 0) :]


def _feedback_bytes(run: Run, profile: Profile, plan: Plan) -> float:
    """Of the busiest worker's lanes, and of its part of the mean."""
    how = read_compression(run.train.compress)
    if not how:
        return 0.0
    lanes = -(-run.train.lanes // plan.data)
    taken = 4 * sum(each.values for each in find_weights(profile) if how.takes(each.shape))
    return taken * (lanes + (0 if how.rank else 1 / plan.data))


def layer_memory(layer: LayerProfile, precision: str, images: int) -> int:
    """Bytes of a layer in training: its weights, their gradients, and what it keeps of some images."""
    return 8 * layer.parameters + _VALUE[precision] * images * kept_values(layer)


def kept_values(layer: LayerProfile) -> int:
    """Values of an image that a layer keeps for its backward pass; activations work in place."""
    return 0 if layer.kind == "activation" else layer.inputs
