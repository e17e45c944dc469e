"""A model's layers dealt by name: some fully connected ones over the workers along data, the others not.

Lanes go in rounds, and each worker computes its own lane up to a split layer, that layer together with all
others for the lanes of all, and goes on with its own.
"""

from __future__ import annotations

import copy
import json
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.comm.group import Group
from lockstep.errors import ModelError
from lockstep.kernels.numerics import half_type
from lockstep.parallel.mix.lane_round import LaneForm, LaneRound
from lockstep.parallel.mix.layer_pattern import find_layers
from lockstep.parallel.mix.mixed_linear import MixedLinear
from lockstep.parallel.mix.row_block import RowSharedModel
from lockstep.parallel.mix.row_cut import RowCut
from lockstep.parallel.model_graph import Values
from lockstep.parallel.split.axes import Axes
from lockstep.parallel.split.layers.split_linear import LinearCut
from lockstep.parallel.split.probes.probe_values import cancel, probe_values
from lockstep.parallel.split.split_graph import SplitGraph
from lockstep.parallel.split.spread import WHOLE
from lockstep.parallel.split.way import FORWARD, INPUT, WEIGHT, Way
from lockstep.spec import Train
from lockstep.spec.plan import Plan


class Mix:
    """The layers of a model that a plan names, and the model's calls with these among them."""

    def __init__(self, grid: SplitGraph, plan: Plan, train: Train, group: Group) -> None:
        """`grid` are the calls of the model by one worker. A collective."""
        self.grid, self.rounds, self.num_steps = grid, LaneRound(group, train.lanes), 0
        self.graph = copy.copy(grid)
        self.graph.ways = list(grid.ways)
        self.layers: dict[str, MixedLinear] = {}  # by the name of the weight
        wire = torch.bfloat16 if train.wire == "bf16" else None
        half, wrong = half_type(train.precision), []
        for name in find_layers(grid.model, plan.layers):
            place, module = _find_call(grid, name)
            sizes = module.in_features, module.out_features, grid.axes.slices
            cut = RowCut(*sizes, group.size, group.rank, frozenset(grid.ways[place].by_slice))
            shape = grid.shapes[grid.inputs(place)[0].name]
            wrong += [name] if _differs(cut, shape, module, half) else []
            layer = MixedLinear(name, module, cut, self.rounds, wire)
            layer.form = LaneForm(shape[0], half or module.weight.dtype, module.weight.device)
            layer.needs_input = any(_is_trained(grid, before) for before in range(place))
            self.layers[grid.own_name(place, "weight")] = layer
            self.graph.ways[place] = _way(layer, grid.inputs(place)[0].name)
        told = group.all_gather_bytes(json.dumps(wrong).encode())
        if everywhere := [name for text in told for name in json.loads(text)]:
            raise ModelError(
                f"--plan {plan}: kernels give other bits for some outputs of '{everywhere[0]}' than for all: "
                "leave it out of layers"
            )

    def share(self, model: nn.Module) -> RowSharedModel:
        """This worker's rows of the weights, from now on taken from there."""
        shared = RowSharedModel(model, {n: layer.cut for n, layer in self.layers.items()}, self.rounds.group)
        for name, layer in self.layers.items():
            layer.rows = lambda name=name: shared.rows(name)
        return shared

    def begin(self) -> None:
        """Start a step."""
        self.num_steps += 1
        for layer in self.layers.values():
            layer.begin()

    def means(self) -> dict[str, Tensor]:
        """The mean gradient of this worker's rows, by the name of the weight."""
        return {name: layer.mean() for name, layer in self.layers.items()}

    @property
    def told(self) -> list[str]:
        """A line for people: what is split, what worker 0 has of it, and what it sends for it."""
        layers = self.layers.values()
        whole = sum(layer.cut.outs * layer.cut.ins for layer in layers)
        own = sum(len(layer.cut.own) * layer.cut.ins for layer in layers)
        sent, by_data = (
            sum(layer.sent_bytes for layer in layers),
            sum(layer.by_data_bytes for layer in layers),
        )
        line = (
            f"by channel over {self.rounds.group.size} workers: {', '.join(layer.name for layer in layers)}"
        )
        return [
            f"{line}; of their {whole / 1e6:.2f} M weights worker 0 keeps {own / 1e6:.2f} M, and sends "
            f"{sent / 1e6:.2f} MB a step for them, by data {by_data / 1e6:.2f}"
        ]

    def report(self) -> list[dict[str, Any]]:
        """What this worker sent for each layer, how long that took, and what data alone sends, by step."""
        steps = max(self.num_steps, 1)
        return [
            {
                "layer": layer.name,
                "outputs": [layer.cut.own.start, layer.cut.own.stop],
                "sent_mb": layer.traffic.num_bytes / 1e6 / steps,
                "exchange_s": layer.traffic.seconds / steps,
                "by_data_mb": layer.by_data_bytes / 1e6,
            }
            for layer in self.layers.values()
        ]


def _is_trained(grid: SplitGraph, place: int) -> bool:
    """Whether a call has parameters that are trained."""
    known = dict(grid.model.named_parameters())
    return any(name in known and known[name].requires_grad for name in grid.tensors_of(place))


def _way(layer: MixedLinear, key: str) -> Way:
    def run(values: Values) -> Tensor:
        return layer(values[key])

    return Way("outputs over data", run)


def _find_call(grid: SplitGraph, name: str) -> tuple[int, nn.Linear]:
    """The call that is a layer, if it can be split."""
    places = [p for p, node in enumerate(grid.calls) if node.op == "call_module" and node.target == name]
    module = grid.module(places[0]) if places else None
    if not isinstance(module, nn.Linear):
        raise ModelError(f"plan.layers: '{name}' or its weight is not used exactly once: leave it out")
    if len(grid.shapes[grid.inputs(places[0])[0].name]) != 2:
        raise ModelError(
            f"plan.layers: the input of '{name}' is no table of samples and numbers: leave it out"
        )
    if not module.weight.requires_grad:
        raise ModelError(f"plan.layers: '{name}' is frozen, so nothing is sent for it: leave it out")
    if module.out_features < grid.axes.slices:
        raise ModelError(
            f"plan.layers: '{name}' has {module.out_features} outputs, fewer than "
            f"train.slices={grid.axes.slices}: leave it out"
        )
    return places[0], module


def _differs(cut: RowCut, shape: torch.Size, module: nn.Linear, half: torch.dtype | None) -> bool:
    """Whether this worker's part, on fixed values, has other bits than that part of one worker's."""
    return any(_differs_once(cut, shape, module, half, part) for part in (FORWARD, INPUT, WEIGHT))


@torch.enable_grad()
def _differs_once(
    cut: RowCut, shape: torch.Size, module: nn.Linear, half: torch.dtype | None, draw: str
) -> bool:
    like = module.weight.detach()
    x, weight = probe_values("x", like.new_empty(shape)), probe_values("weight", like)
    dy = probe_values("dy", like.new_empty(shape[0], cut.outs))
    cancel(draw, x, weight, dy, transposed=False)
    x, weight, dy = (tensor.to(half or like.dtype) for tensor in (x, weight, dy))
    bias = None
    if module.bias is not None:
        bias = probe_values("bias", like.new_empty(cut.outs)).to(x.dtype)
    given = x.requires_grad_(), weight.requires_grad_()
    whole = LinearCut(Axes(slices=cut.slices), WHOLE, WHOLE, cut.ins, cut.outs)
    whole.by_slice |= cut.by_slice
    y = whole(*given, bias)
    grad = torch.autograd.grad(y, weight, dy)[0]
    rows = slice(cut.own.start, cut.own.stop)
    with torch.no_grad():
        own, part = weight[rows].clone(), dy[:, rows].contiguous()
        edges = [slice(s.start + rows.start, s.stop + rows.start) for s in cut.own_slices]
        return not (
            torch.equal(cut.forward(x, own, None if bias is None else bias[rows]), y[:, rows])
            and torch.equal(cut.weight_gradient(part, x), grad[rows])
            and all(
                torch.equal(part[:, near] @ own[near], dy[:, far] @ weight[far])
                for near, far in zip(cut.own_slices, edges, strict=True)
            )
        )
