"""Where a model may be cut into stages, what each call costs, and the cuts that balance the stages."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lockstep.errors import ModelError
from lockstep.kernels.structure import leaves
from lockstep.parallel.model_graph import Key, ModelGraph, Value, Values
from lockstep.parallel.tensor_form import form_of, is_dense

_PLAIN = (bool, int, float, str, type(None), torch.Size, torch.dtype, torch.device)
_TIMES = 2  # each call is measured; the shortest time counts


@dataclass(frozen=True)
class Trial:
    """What one lane through all calls has shown."""

    allowed: list[int]  # places before which the model may be cut
    costs: list[float]  # of each call, forward and backward
    tensors: dict[Key, Value]
    plain: Values  # what is no tensor, and the same for every lane
    draws: bool  # whether a call draws from torch's generator


def try_lane(graph: ModelGraph, images: Tensor, cost: str, keeps_shared: bool) -> Trial:
    """Compute one lane, call by call; with `keeps_shared`, parameters of several calls stay in one stage.

    `cost` is "measured", a time in seconds, or "counted", multiplications and values written. What a
    call keeps for a backward pass is freed after it, and a value after its last use. Of a model on `meta`
    each call gets stand-ins for its parameters.
    """
    values: Values = {graph.input: images}
    versions = {graph.input: images._version}
    changed: dict[Key, int] = {}  # the last place that changed a value
    tensors = {key: _value(key, t) for key, t in {**values, **_shared_parameters(graph)}.items()}
    plain: Values = {}
    costs, sendable, draws = [], [], False
    saved: list[list[Tensor]] = []  # what the calls keep for a backward pass, each freed after its call

    def keep(tensor: Tensor) -> list[Tensor]:
        saved.append([tensor])
        return saved[-1]

    with saved_tensors_hooks(keep, lambda box: box[0]):
        for place, node in enumerate(graph.calls):
            sendable.append(_can_go(graph.crossing(place), values, plain))
            given = {**values, **plain, **_stand_ins(graph, place, images.device)}
            measured = _measure(graph, place, given, images.device) if cost == "measured" else 0.0
            state = _generator(images)
            values[node.name] = graph.call(place, given)
            draws = draws or not torch.equal(state, _generator(images))
            for box in saved:
                box.clear()
            saved.clear()
            costs.append(measured or _count(graph, place, values))
            for key, value in values.items():
                version = sum(part._version for part in leaves(value))
                if key in versions and version != versions[key]:
                    changed[key] = place
                if isinstance(value, Tensor) and version != versions.get(key):
                    tensors[key] = _value(key, value)
                versions[key] = version
            plain |= {key: value for key, value in values.items() if _is_plain(value)}
            for key in [key for key in values if graph.last_uses.get(key, -1) <= place]:
                del values[key]
    kept = _kept(graph, keeps_shared)
    allowed = [
        place
        for place in range(1, len(graph.calls))
        if sendable[place]
        and not any(first < place <= last for first, last in kept)
        and all(changed.get(key, -1) < place for key in graph.crossing(place))
    ]
    return Trial(allowed, costs, tensors, plain, draws)


def choose_cuts(costs: Sequence[float], allowed: Sequence[int], stages: int) -> list[int]:
    """The cuts that make the most expensive stage as cheap as possible; with equal cost, the earliest."""
    if len(allowed) < stages - 1:
        raise ModelError(
            f"plan.pipeline={stages}: the model can be cut at {len(allowed)} places only: "
            f"use at most {len(allowed) + 1} stages"
        )
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    ends = [0, *allowed, len(costs)]
    # best[i]: the least cost of the worst stage, and its cuts, if what comes before ends[i] is dealt with
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    for stage in range(stages):
        last = stage == stages - 1
        found: dict[int, tuple[float, list[int]]] = {}
        for end in range(stage + 1, len(ends)) if not last else [len(ends) - 1]:
            ways = [
                (max(worst, sums[ends[end]] - sums[ends[start]]), [*cuts, ends[end]])
                for start, (worst, cuts) in best.items()
                if start < end
            ]
            if ways:
                found[end] = min(ways)
        best = found
    return best[len(ends) - 1][1][:-1]


def named_cuts(labels: Sequence[str], allowed: Sequence[int], names: Sequence[str]) -> list[int]:
    """The cuts before the layers that a user names; `labels` are those of all layers."""
    found = []
    for name in names:
        places = [n for n, label in enumerate(labels) if f".{name}." in f".{label}."]
        if not places:
            others = ", ".join(dict.fromkeys(labels[place] for place in allowed))
            raise ModelError(f"plan.cuts: the model has no layer '{name}'; it can be cut before {others}")
        if places[0] not in allowed:
            raise ModelError(
                f"plan.cuts: the model cannot be cut before '{name}': what goes there is changed in place "
                "or is no tensor, or it is the first layer: name another"
            )
        found.append(places[0])
    if sorted(set(found)) != found:
        raise ModelError(f"plan.cuts={'/'.join(names)} must be in the order of the forward pass")
    return found


def share_of_work(costs: Sequence[float], own: range) -> str:
    """The share of a stage in the cost of all, for people."""
    total = sum(costs)
    return f"{sum(costs[own.start : own.stop]) / total if total else 0.0:.0%} of the work"


def _value(key: Key, tensor: Tensor) -> Value:
    return Value(key, form_of(tensor), tensor.requires_grad)


def _can_go(keys: Sequence[Key], values: Values, plain: Values) -> bool:
    """Whether values can be sent: tensors without gaps, none of them under two names, or plain constants."""
    tensors = [values[key] for key in keys if isinstance(values.get(key), Tensor)]
    others = [key for key in keys if key not in values or key in plain]
    whole = len(tensors) + len(others) == len(keys) and all(map(is_dense, tensors))
    return whole and len(set(map(id, tensors))) == len(tensors)


def _stand_ins(graph: ModelGraph, place: int, device: torch.device) -> Values:
    """Memory for the parameters and buffers of a call that are on `meta`."""
    known = {**dict(graph.model.named_parameters()), **dict(graph.model.named_buffers())}
    used = {name: known[name] for name in graph.tensors_of(place) if known[name].is_meta}
    return {name: torch.ones_like(tensor, device=device) for name, tensor in used.items()}


def _keep(tensor: Tensor) -> Tensor:
    return tensor


def _kept(graph: ModelGraph, keeps_shared: bool) -> list[tuple[int, int]]:
    """Places of calls that must stay in one stage: those that share a buffer, or any tensor if so asked."""
    buffers = dict(graph.model.named_buffers())
    return [places for name, places in graph.shared.items() if keeps_shared or name in buffers]


def _shared_parameters(graph: ModelGraph) -> Values:
    return {name: p for name, p in graph.model.named_parameters() if name in graph.shared}


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)


def _generator(like: Tensor) -> Tensor:
    return torch.cuda.get_rng_state(like.device) if like.is_cuda else torch.get_rng_state()


def _count(graph: ModelGraph, place: int, values: Values) -> float:
    """Multiplications of a forward and a backward pass, and values written."""
    written = sum(part.numel() for part in leaves(values[graph.calls[place].name]))
    known = dict(graph.model.named_parameters())
    weights = [known[name] for name in graph.tensors_of(place) if name in known]
    return float(written + 3 * sum(w.numel() * (written // len(w)) for w in weights if w.dim() > 1))


def _measure(graph: ModelGraph, place: int, values: Values, device: torch.device) -> float:
    """The seconds of one call, forward and backward, on copies of what it gets."""
    used = {node.name for node in graph.calls[place].all_input_nodes}
    known, state, seconds = dict(graph.model.named_parameters()), torch.get_rng_state(), []
    weights = [known[name] for name in graph.tensors_of(place) if name in known]
    for _ in range(_TIMES):
        given = {key: value for key, value in values.items() if key in used and isinstance(value, Tensor)}
        ends = {key: value.detach().requires_grad_(value.requires_grad) for key, value in given.items()}
        copies = {key: end.clone() for key, end in ends.items()}  # a call may change what it gets
        _wait(device)
        start = time.perf_counter()
        with saved_tensors_hooks(_keep, _keep):
            outputs = [o for o in leaves(graph.call(place, {**values, **copies})) if o.requires_grad]
        inputs = [tensor for tensor in (*ends.values(), *weights) if tensor.requires_grad]
        if outputs and inputs:
            ones = [torch.ones_like(output) for output in outputs]
            torch.autograd.grad(outputs, inputs, ones, allow_unused=True)
        _wait(device)
        seconds.append(time.perf_counter() - start)
    torch.set_rng_state(state)
    return min(seconds)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
