"""Asks the kernels of a compiled model whether they keep their bits when a product is cut by channels.

They are stock kernels, which promise nothing. So every layer's products are tried at the run's shapes and in
its type, on fixed values whose sums cancel: whether this worker's channels are those of the whole, for one
lane and for as many at once as the run takes. What fails on any worker is computed whole by everyone, so the
answer changes no bit, only the time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.kernels.stock.custom_op import (
    conv_data_grad,
    conv_forward,
    conv_weight_grad,
    product,
    product_weight_grad,
)
from lockstep.kernels.stock.lane_function import Conv
from lockstep.kernels.stock.product_cut import LayerCuts, ProductCut
from lockstep.kernels.stock.stock_conv import lying_last
from lockstep.kernels.triton.conv.tile import KERNEL_TYPES
from lockstep.kernels.triton.conv.tile_table import OPERATIONS
from lockstep.lower.compiled.compiled_layer import look
from lockstep.lower.compiled.compiled_network import CompiledModel
from lockstep.lower.fused.tile_deal import CHANNELS, Deal
from lockstep.lower.layer_split import InParts
from lockstep.parallel.products.channel_workers import ChannelWorkers
from lockstep.parallel.split.probes.probe_values import cancel, probe_values
from lockstep.parallel.split.way import FORWARD, INPUT, WEIGHT
from lockstep.spec import Train

_UNITS = (64, 32, 16, 8, 1)  # channels that are not cut, the largest that leave the parts even
_DRAWS = {"forward": FORWARD, "input_grad": INPUT, "weight_grad": WEIGHT}
_DIMS = {"forward": 1, "input_grad": 1, "weight_grad": 0}  # of the channels of each result


@dataclass(frozen=True)
class _Layer:
    """A layer as its products see it: a filter or a matrix, and one sample of its input."""

    name: str
    weight: torch.Size
    sample: tuple[int, ...]
    conv: Conv | None  # None: fully connected
    lane_size: int
    has_input_grad: bool

    @property
    def operations(self) -> list[str]:
        return [name for name in OPERATIONS if name != "input_grad" or self.has_input_grad]

    @property
    def key(self) -> Hashable:
        return self.weight, self.sample, self.conv, self.has_input_grad

    def deals(self, workers: int) -> dict[str, Deal]:
        """How each product could be dealt out: not those of groups, or of kernels of ours for images."""
        outputs, inputs = self.weight[0], self.weight[1]
        counts = {"forward": outputs, "input_grad": inputs, "weight_grad": outputs}
        if self.conv and (self.conv.groups > 1 or self.conv.own):
            return {}
        found = {}
        for name in self.operations:
            best = min((Deal(CHANNELS, counts[name], unit, workers) for unit in _UNITS), key=_most)
            if all(map(len, best.ranges())):
                found[name] = best
        return found

    def work(self) -> int:
        """The multiplications of one of its products, for a lane."""
        weight = torch.empty(self.weight, device="meta")
        y = self.forward_shape(weight)
        return self.lane_size * y.numel() * weight[0].numel()

    def forward_shape(self, weight: Tensor) -> torch.Size:
        """The shape of one sample's output."""
        if self.conv is None:
            return self.weight[:1]
        x = torch.empty(1, *self.sample, device="meta")
        return F.conv2d(x, weight, None, *self.conv[:4]).shape[1:]

    def lanes(self, operation: str, at_once: set[int]) -> set[int]:
        """The numbers of lanes that one call computes."""
        conv = self.conv
        ways = {"forward": conv and conv.forward_at_once, "input_grad": conv and conv.gradient_at_once}
        return at_once | {1} if ways.get(operation) else {1}

    def run(self, operation: str, x: Tensor, w: Tensor, g: Tensor, place: int) -> Tensor:
        """The result of a product, as the run computes it."""
        conv, size, found = self.conv, self.lane_size, None
        if conv and operation == "forward":
            found = conv_forward(x, w, *conv[:5], conv.forward_at_once, place)
        elif conv and operation == "input_grad":
            found = conv_data_grad(g, x, w, *conv[:5], conv.gradient_at_once, place)
        elif conv:
            found = conv_weight_grad(g, x, w, *conv[:5], place)
        elif operation == "weight_grad":
            found = product_weight_grad(g, x, size, place)
        else:
            is_forward = operation == "forward"
            found = product(x if is_forward else g, w, size, is_forward, place)
        assert isinstance(found, Tensor)
        return found


def _most(deal: Deal) -> float:
    return deal.most


@torch.no_grad()
def cut_layers(
    model: CompiledModel, train: Train, workers: ChannelWorkers, at_once: set[int], device: torch.device
) -> list[dict[str, Any]]:
    """Deal out the products that keep their bits; a row for each layer. A collective."""
    dtype, known, rows = KERNEL_TYPES[train.precision][0], dict[Hashable, list[str]](), []
    for layer in _find_layers(model, train, device):
        deals = layer.deals(workers.size)
        if layer.key not in known:
            mine = [
                name for name in deals if _is_same(layer, name, deals[name], workers, at_once, dtype, device)
            ]
            told = workers.group.all_gather_bytes(json.dumps(mine).encode())
            known[layer.key] = [name for name in mine if all(name in json.loads(text) for text in told)]
        kept = {name: deals[name] for name in known[layer.key]}
        if kept:
            workers.cuts[layer.name] = _cut(kept, workers, partial(_fill, workers, layer.name))
        share = sum(deal.share for deal in kept.values()) / len(layer.operations)
        rows.append(
            {
                "layer": layer.name,
                "rule": ", ".join(f"{name} channels" for name in kept) or "whole",
                "work_mmac": round(layer.work() * len(layer.operations) / 1e6, 6),
                "share": round(share, 4),
            }
        )
    return rows


def _find_layers(model: CompiledModel, train: Train, device: torch.device) -> list[_Layer]:
    """The convolutions and fully connected layers of some blocks, in the order of the forward pass."""
    copy = deepcopy(model.module).train()
    shapes = look(copy, torch.zeros(2, *model.image, device=device)).shapes
    found: list[_Layer] = []
    size = train.batch // train.lanes
    for number, name in enumerate(shapes):
        layer = model.module.get_submodule(name)
        is_conv = isinstance(layer, nn.Conv2d) and type(layer) is nn.Conv2d
        is_rows = isinstance(layer, nn.Linear) and type(layer) is nn.Linear and len(shapes[name]) == 1
        if (is_conv or is_rows) and model.has(name):
            conv = model.convs[name] if is_conv else None
            weight: Any = layer.weight.shape
            found.append(_Layer(name, weight, shapes[name], conv, size, has_input_grad=number > 0))
    return found


def _is_same(
    layer: _Layer, operation: str, deal: Deal, workers: ChannelWorkers, at_once: set[int],
    dtype: torch.dtype, device: torch.device,
) -> bool:  # fmt: skip
    """Whether this worker's channels of a product have the bits that they have in the whole."""
    cuts = _cut({operation: deal}, workers, lambda *_: None)
    part = cuts.cuts[operation]
    for lanes in sorted(layer.lanes(operation, at_once)):
        for draw in (_DRAWS[operation], None):
            x, w, g = _values(layer, draw, lanes, device, dtype)
            whole, mine = (layer.run(operation, x, w, g, place) for place in (0, cuts.place))
            dim = _DIMS[operation]
            if not _equal(part.part(whole, dim), part.part(mine, dim)):
                return False
    return True


def _values(
    layer: _Layer, draw: str | None, lanes: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """An input, a weight and an output's gradient of some lanes, so that the sums of one product cancel."""
    count, w = lanes * layer.lane_size, torch.empty(layer.weight, device=device)
    shapes = (count, *layer.sample), tuple(w.shape), (count, *layer.forward_shape(w.to("meta")))
    named = zip(("x", "weight", "dy"), shapes, strict=True)
    x, w, g = (probe_values(name, torch.empty(shape, device=device)) for name, shape in named)
    if draw:
        cancel(draw, x, w, g, transposed=False)
    x, w, g = (tensor.to(dtype) for tensor in (x, w, g))
    return (lying_last(x), lying_last(w), lying_last(g)) if layer.conv else (x, w, g)


def _cut(
    deals: Mapping[str, Deal],
    workers: ChannelWorkers,
    fill: Callable[[Deal, Tensor, int], None],
) -> LayerCuts:
    """This worker's part of each product, and how the parts of others come to it."""
    rank = workers.rank
    return LayerCuts(
        {
            name: ProductCut(deal.count, deal.ranges()[rank], partial(fill, deal))
            for name, deal in deals.items()
        }
    )


def _fill(workers: ChannelWorkers, layer: str, deal: Deal, tensor: Tensor, dim: int) -> None:
    workers.make_whole(layer, [InParts(tensor, dim, deal.ranges())])


def _equal(a: Tensor, b: Tensor) -> bool:
    one, other = (tensor.contiguous().view(-1).view(torch.uint8) for tensor in (a, b))
    return torch.equal(one, other)
