"""Asks kernels under a plan, on fixed values at a run's shapes, whether they keep their bits in parts.

Whether this worker's part of every call, forward and backward, is that part of what one worker computes. What
fails is computed when its halo has come, for all channels, or whole; so the answer changes no bit, only the
time. What does not depend on a plan is asked by `cell_probe.py`.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator, Mapping

import torch
from torch import Tensor

from lockstep.kernels.numerics import half_precision
from lockstep.parallel.model_graph import Values
from lockstep.parallel.split.call_site import CallSite
from lockstep.parallel.split.lane_gradients import make_whole
from lockstep.parallel.split.probes.probe_values import cancel, probe_values
from lockstep.parallel.split.split_graph import SplitGraph
from lockstep.parallel.split.way import BIAS, FORWARD, INPUT, WEIGHT, Way


class PlanProbe:
    """Compares this worker's part of each call with what one worker computes."""

    def __init__(self, alone: SplitGraph, half: torch.dtype | None) -> None:
        self._alone, self._half = alone, half
        self._known: dict[Hashable, list[set[str]] | None] = {}

    def check(self, graph: SplitGraph, place: int, way: Way) -> Way:
        """The way without cuts that would change bits: perhaps one worker's way, by all of them."""
        alone = self._alone.ways[place]
        way.by_band |= alone.by_band
        way.by_slice |= alone.by_slice
        module = graph.module(place)
        if not module or (not way.work and not way.gradients and not list(module.children()) and way.exact):
            return way
        given = tuple(graph.spreads[n.name] for n in graph.inputs(place))
        if way.made.is_whole and all(spread.is_whole for spread in given):
            return way
        shapes = tuple(graph.shapes[n.name] for n in graph.inputs(place))
        key = repr(module), given, shapes, way.made
        if key not in self._known:
            self._known[key] = self._find(graph, place, way)
        kept = self._known[key]
        if kept is None:
            return CallSite(graph, place).whole(
                "whole: kernels give other bits in parts", dict(way.work), alone.run
            )
        for parts, right in zip((way.inner_first, way.by_channel), kept, strict=True):
            parts.intersection_update(right)
        return way

    def _find(self, graph: SplitGraph, place: int, way: Way) -> list[set[str]] | None:
        """Of which parts the inner rows may come first, and which may be cut by channels.

        None if the call has other bits even without both.
        """
        choices = way.inner_first, way.by_channel
        before, wrong = [set(parts) for parts in choices], self._wrong(graph, place, way)
        for parts in choices:
            if wrong & parts:
                parts.difference_update(wrong)
                wrong = self._wrong(graph, place, way)
        found = None if wrong else [set(parts) for parts in choices]
        for parts, all_parts in zip(choices, before, strict=True):
            parts.update(all_parts)
        return found

    def _wrong(self, graph: SplitGraph, place: int, way: Way) -> set[str]:
        """Which parts of a call have other bits than one worker's, on any worker of the lane."""
        axes, node = graph.axes, graph.calls[place]
        graph.spreads[node.name] = way.made
        wrong: set[str] = set()
        for draw in (FORWARD, INPUT, WEIGHT):
            whole = _compute(self._alone, place, self._alone.ways[place], self._half, draw)
            mine = _compute(graph, place, way, self._half, draw)
            for part in (WEIGHT, BIAS):
                names = {name: way.gradients[name] for name in way.gradients if name in mine[part]}
                mine[part] = make_whole(axes, mine[part], names)
            for part, values in whole.items():
                for key, value in values.items():
                    own = value if part in (WEIGHT, BIAS) else axes.own_part(value, graph.spreads[key])
                    wrong |= {part} if not torch.equal(mine[part][key], own) else set()
        for group in (axes.channel, axes.spatial):
            told = group.all_gather_bytes(json.dumps(sorted(wrong)).encode())
            wrong = {part for text in told for part in json.loads(text)}
        return wrong


def compute_layers(graph: SplitGraph, half: torch.dtype | None) -> Iterator[Tensor]:
    """What every kind of layer with parameters gives on fixed values, one worker alone."""
    seen: set[Hashable] = set()
    for place, way in enumerate(graph.ways):
        shapes = tuple(graph.shapes[node.name] for node in graph.inputs(place))
        key = repr(graph.module(place)), shapes
        if graph.module(place) and graph.tensors_of(place) and way.work and key not in seen:
            seen.add(key)
            for values in _compute(graph, place, way, half).values():
                yield from values.values()


def _compute(
    graph: SplitGraph, place: int, way: Way, half: torch.dtype | None, draw: str = FORWARD
) -> dict[str, dict[str, Tensor]]:
    """What a call gives, forward and backward, on fixed values: each worker of those it has."""
    axes, node = graph.axes, graph.calls[place]
    device = next(graph.model.parameters()).device
    known: Mapping[str, Tensor] = {
        **dict(graph.model.named_parameters()),
        **dict(graph.model.named_buffers()),
    }
    sources, tensors = [n.name for n in graph.inputs(place)], {}
    whole = {key: probe_values(key, torch.empty(graph.shapes[key], device=device)) for key in sources}
    for name in graph.tensors_of(place):
        own = known[name]
        tensors[name] = probe_values(name, own) if own.is_floating_point() else own.clone()
    dy = probe_values("dy", torch.empty(graph.shapes[node.name], device=device))
    weight = graph.parameter(place, "weight", tensors)
    if way.work and weight is not None and len(sources) == 1:
        transposed = isinstance(graph.module(place), torch.nn.ConvTranspose2d)
        cancel(draw, whole[sources[0]], weight, dy, transposed)
    given: Values = {
        key: axes.own_part(value.to(graph.dtypes[key]), graph.spreads[key]).clone().requires_grad_()
        for key, value in whole.items()
    }
    for name, tensor in tensors.items():
        tensor.requires_grad_(isinstance(known[name], torch.nn.Parameter))
    streams = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(streams), half_precision(device, half):
        out = way.run({**given, **tensors})
    dy = axes.own_part(dy.to(out.dtype), way.made).contiguous()
    trained = {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}
    ends = {**given, **trained}
    grads = dict(zip(ends, torch.autograd.grad(out, list(ends.values()), dy, allow_unused=True), strict=True))
    changed = {name: t for name, t in tensors.items() if not t.requires_grad}
    found = {name: grads[name] for name in trained if grads[name] is not None}
    biases = [name for name in found if name.endswith("bias")]
    return {
        FORWARD: {node.name: out.detach()},
        INPUT: {key: grads[key] for key in given if grads[key] is not None},
        WEIGHT: {**{name: found[name] for name in found if name not in biases}, **changed},
        BIAS: {name: found[name] for name in biases},
    }
