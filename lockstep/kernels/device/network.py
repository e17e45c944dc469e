"""A chain of fused layers with a loss at its end: forward and backward of all lanes, on buffers of its own.

A gradient's way begins here: backward → lane tree. Everything lies in flat tables in the order of the
layers: parameters, their copy in the kernels' type, and the parts of their gradients lane by lane.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lockstep.kernels.device.forward import forward
from lockstep.kernels.device.gradient import input_grad, weight_grad
from lockstep.kernels.device.layer import Layer
from lockstep.kernels.device.loss import cross_entropy, lane_means
from lockstep.kernels.device.table import Table
from lockstep.kernels.device.tree import tree_sum
from lockstep.spec import Train

_ALIGN = 64  # elements; a load of 16 bytes must not straddle two tensors
_TYPES = {"fp32": (torch.float32, "ieee"), "tf32": (torch.float32, "tf32"), "bf16": (torch.bfloat16, "ieee")}


@dataclass(frozen=True)
class Place:
    """Where a layer's weight and bias lie in the flat tables."""

    weight: slice
    bias: slice


@dataclass
class Group:
    """Neighbours in the flat tables whose gradients are cut into equally many chunks a lane."""

    chunks: int
    first: int
    stop: int = 0


class Layout:
    """The flat tables: every layer's weight and bias, then the loss and the number of right answers."""

    def __init__(self, layers: Sequence[Layer], chunks: Sequence[int]) -> None:
        self.size = 0
        self.places: list[Place] = []
        self.groups: list[Group] = []
        for layer, count in zip(layers, chunks, strict=True):
            self._begin(count)
            weight = self._take(layer.depth * layer.out_channels)
            self.places.append(Place(weight, self._take(layer.out_channels)))
        self._begin(1)
        self.loss: int = self._take(1).start
        self.right: int = self._take(1).start

    def _begin(self, chunks: int) -> None:
        if not self.groups or self.groups[-1].chunks != chunks:
            self.groups.append(Group(chunks, self.size))

    def _take(self, size: int) -> slice:
        first = self.size
        self.size += -(-size // _ALIGN) * _ALIGN
        self.groups[-1].stop = self.size
        return slice(first, first + size)


def _chunks(parts: int, total_lanes: int, lane_size: int) -> int:
    """Chunks of a lane: a power of two, never more than samples, the same for any number of workers."""
    chunks = max(parts // total_lanes, 1)
    while chunks > lane_size:
        chunks //= 2
    return chunks


class Network:
    """Runs `lanes` lanes of `lane_size` samples through a chain of fused layers."""

    def __init__(
        self, layers: Sequence[Layer], lanes: int, train: Train, device: torch.device, table: Table
    ) -> None:
        self.layers, self.lanes, self.lane_size = list(layers), lanes, train.batch // train.lanes
        self._smoothing = train.label_smoothing
        self._dtype, self._input_precision = _TYPES[train.precision]
        self.tiles = [table.tiles(layer, train.precision) for layer in layers]
        chunks = [_chunks(tiles["weight_grad"].parts, train.lanes, self.lane_size) for tiles in self.tiles]
        self.layout = Layout(layers, chunks)
        count = lanes * self.lane_size

        def zeros(*shape: int, dtype: torch.dtype = self._dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.x = [zeros(count, *layer.in_shape) for layer in layers]
        self.logits = zeros(count, layers[-1].out_channels, dtype=torch.float32)
        self.labels = zeros(count, dtype=torch.int32)
        self._code = [
            zeros(count, *layer.out_shape, dtype=torch.uint8) if layer.pool > 1 else None for layer in layers
        ]
        self._compact = [i == 0 and layer.pool > 1 for i, layer in enumerate(layers)]
        shapes = [
            layer.out_shape if compact else layer.grad_shape
            for layer, compact in zip(layers, self._compact, strict=True)
        ]
        self._g = [zeros(count, *shape) for shape in shapes]
        self.loss, self.right = zeros(count, dtype=torch.float32), zeros(count, dtype=torch.float32)
        size = self.layout.size
        self._parts = [
            zeros(lanes * group.chunks, group.stop - group.first, dtype=torch.float32)
            for group in self.layout.groups
        ]
        self.copy = zeros(size)  # the weights in the kernels' type
        self.weights = zeros(size, dtype=torch.float32)  # the master weights; biases are read from here
        self.keys = zeros(len(layers), lanes, dtype=torch.int64)

    def forward(self, training: bool = True) -> None:
        """x[0] and the weights' copy → logits; dropout only in training."""
        for i in range(len(self.layers)):
            self.run("forward", i, training)

    def score(self) -> None:
        """logits and labels → each sample's loss, whether it is right, and the gradient of its logits."""
        cross_entropy(
            self.logits, self.labels, self.loss, self.right, self._g[-1].view(len(self.logits), -1),
            self.lane_size, self._smoothing,
        )  # fmt: skip

    def backward(self) -> None:
        """logits and labels → the parts of all gradients, each lane's loss and its right answers."""
        self.score()
        layout = self.layout
        ends = [self._part(slice(at, at + 1)).squeeze(1) for at in (layout.loss, layout.right)]
        lane_means(self.loss, self.right, *ends)
        for i in reversed(range(len(self.layers))):
            self.run("weight_grad", i)
            if i:
                self.run("input_grad", i)

    def run(self, operation: str, i: int, training: bool = True) -> None:
        """One launch, of layer i."""
        layer, place, tile = self.layers[i], self.layout.places[i], self.tiles[i][operation]
        precision, is_last = self._input_precision, i == len(self.layers) - 1
        if operation == "forward":
            forward(
                layer if training else replace(layer, dropout=0.0),
                self.x[i], self.copy[place.weight], self.weights[place.bias],
                self.logits if is_last else self.x[i + 1], self._code[i], tile,
                out_border=(0, 0) if is_last else self.layers[i + 1].pad,
                keys=self.keys[i], lane_size=self.lane_size, precision=precision,
            )  # fmt: skip
        elif operation == "weight_grad":
            weight_grad(
                layer, self._g[i], self._code[i], self.x[i], self._part(place.weight), self._part(place.bias),
                self.lanes, tile, compact=self._compact[i], precision=precision,
            )  # fmt: skip
        else:
            input_grad(
                layer, self.layers[i - 1], self._g[i], self.copy[place.weight], self.x[i], self._code[i - 1],
                self._g[i - 1], tile, compact=self._compact[i - 1], precision=precision,
            )  # fmt: skip

    def sum_lanes(self, lanes: range, out: Tensor, bad: Tensor) -> None:
        """The lane tree over the parts of a power of two of lanes, into one flat table."""
        for group, parts in zip(self.layout.groups, self._parts, strict=True):
            own = parts[lanes.start * group.chunks : lanes.stop * group.chunks]
            tree_sum(own, out[group.first : group.stop], bad, 1.0)

    def _part(self, place: slice) -> Tensor:
        """The columns of the parts that hold the gradients of `place`."""
        for group, parts in zip(self.layout.groups, self._parts, strict=True):
            if group.first <= place.start < group.stop:
                return parts[:, place.start - group.first : place.stop - group.first]
        raise AssertionError(place)
