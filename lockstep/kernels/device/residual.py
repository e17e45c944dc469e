"""A residual network with a loss at its end: forward and backward of all lanes, on buffers of its own.

A gradient's way begins here: backward → lane tree. A network is units in order, each a convolution, a batch
norm by lane, perhaps another unit's output added, perhaps a ReLU; then the mean over pixels and a classifier.

Legend: z is what a convolution gives, y what a unit gives, g the gradient of what enters its ReLU, dz that
of z. A unit that is only added to another (a projection) has that one's g.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lockstep.kernels.device.average import average, spread
from lockstep.kernels.device.box import LEAST, holds_lanes, takes_boxes
from lockstep.kernels.device.boxed import box_conv, box_data_grad, box_weight_grad
from lockstep.kernels.device.data import data_grad
from lockstep.kernels.device.flat import KernelNetwork, Slot, lane_chunks
from lockstep.kernels.device.forward import forward
from lockstep.kernels.device.gradient import input_grad, weight_grad
from lockstep.kernels.device.layer import Layer
from lockstep.kernels.device.moments import AllLanes, Statistics, find_moments, statistics
from lockstep.kernels.device.norm import Norm, apply, norm_chunks
from lockstep.kernels.device.norm_grad import norm_grad
from lockstep.kernels.device.table import OPERATIONS, Table
from lockstep.kernels.device.tile import Tile
from lockstep.spec import Train

IMAGES = -1  # as a source: what the network is given
PER_UNIT = 5  # tensors of a unit: weight, gamma, beta, and the running mean and variance


@dataclass(frozen=True)
class Unit:
    """A convolution without bias and the norm after it; `source` and `residual` are numbers of units."""

    layer: Layer
    source: int
    residual: int | None
    relu: bool
    eps: float
    momentum: float


class ResidualNetwork(KernelNetwork):
    """Runs `lanes` lanes of `lane_size` samples through units and a classifier."""

    def __init__(
        self,
        units: Sequence[Unit],
        head: Layer,
        lanes: int,
        train: Train,
        device: torch.device,
        table: Table,
    ) -> None:
        self._units, self._head, self._sync_norm = list(units), head, train.sync_norm
        self.layers = [*(unit.layer for unit in units), head]
        self.tiles = [table.tiles(layer, train.precision) for layer in self.layers]
        lane_size = train.batch // train.lanes
        chunks = [lane_chunks(tiles["weight_grad"].parts, train.lanes, lane_size) for tiles in self.tiles]
        self._box_sizes = self._fit_boxes(lane_size, chunks)
        super().__init__(_slots(units, head, chunks), head.out_channels, lanes, train, device)
        count = len(self.labels)
        self._norms = [_norm(unit, lane_size, train.lanes) for unit in units]
        self._stats = [self._statistics(*sizes) for sizes in zip(self._norms, self._box_sizes, strict=True)]
        first = units[0].layer
        images = first.height, first.width, first.in_channels
        self.x = [self.zeros(count, *_with_border(units, IMAGES, images))]
        outputs = [unit.layer.out_shape for unit in units]
        self._y = [self.zeros(count, *_with_border(units, i, shape)) for i, shape in enumerate(outputs)]
        self._z, self._g = [], []
        for unit in units:
            self._z.append(self.zeros(count, *unit.layer.out_shape))
            self._g.append(self.zeros(count, *unit.layer.out_shape))
        for i, unit in enumerate(units):
            if unit.residual is not None and not any(other.source == unit.residual for other in units):
                self._g[unit.residual] = self._g[i]
        self._dz = {key: self.zeros(count, *key[0]) for key in map(self._dz_shape, range(len(units)))}
        self._pooled, self._g_pooled = (self.zeros(count, *head.in_shape) for _ in range(2))
        self.keys = self.zeros(0, lanes, dtype=torch.int64)
        self._g_head = self.zeros(count, 1, 1, head.out_channels)

    def _fit_boxes(self, lane_size: int, chunks: Sequence[int]) -> list[int]:
        """Leave boxes to tiles that go with the shapes; of how many pixels each unit finds moments."""
        sizes = []
        for i, (unit, tiles) in enumerate(zip(self._units, self.tiles, strict=False)):
            for name in OPERATIONS:
                tile = tiles[name]
                fits = tile.boxes and takes_boxes(name, unit.layer, tile, lane_size, chunks[i])
                if name == "weight_grad":  # boxes know no border
                    fits = fits and self._dz_shape(i)[1] == (0, 0)
                tiles[name] = replace(tile, boxes=fits)
            tile = tiles["forward"]
            sizes.append(tile.rows if tile.boxes and holds_lanes(unit.layer, tile, lane_size) else 0)
        return sizes

    def forward(self, training: bool = True) -> None:
        """x[0] and the weights' copy → logits; by lane statistics in training, else by running ones."""
        for i, unit in enumerate(self._units):
            self.run("forward", i, training)
            norm, z, stats = self._norms[i], self._z[i], self._stats[i]
            _, gamma, beta, mean, var = (self.weights[place] for place in self._places(i))
            factor, shift, rows = stats.factor, stats.shift, norm.rows
            if training:
                out = [self.part(place) for place in self._places(i)[-2:]]
                size = self._box_sizes[i] or find_moments(norm, z, stats)
                statistics(norm, size, gamma, beta, (mean, var), (out[0], out[1]), stats, self._shared)
            else:
                factor = gamma / torch.sqrt(var + norm.eps)
                shift, rows = beta - mean * factor, norm.rows * self.lanes
            residual = None if unit.residual is None else self._y[unit.residual]
            apply(norm, z, factor, shift, self._y[i], residual, rows)
        average(self._norms[-1], self._y[-1], self._pooled)
        self.run("forward", len(self._units))

    def score(self) -> None:
        self.score_into(self._g_head)

    def backward(self) -> None:
        self.score()
        self.average_scores()
        self.run("weight_grad", len(self._units))
        self.run("input_grad", len(self._units))
        spread(self._norms[-1], self._g_pooled, self._y[-1], self._g[-1])
        for i in reversed(range(len(self._units))):
            _, gamma, beta, _, _ = self._places(i)
            parts = self.part(gamma), self.part(beta)
            stats, dz = self._stats[i], self._dz_of(i)
            norm_grad(self._norms[i], self._g[i], self._z[i], stats, *parts, dz, self._shared)
            self.run("weight_grad", i)
            if self._units[i].source != IMAGES:
                self.run("input_grad", i)

    def run(self, operation: str, i: int, training: bool = True) -> None:
        """One operation of a unit's convolution, or of the classifier behind the last one."""
        tile, precision = self.tiles[i][operation], self.precision
        if i == len(self._units):
            self._run_head(operation, tile)
            return
        unit, weight = self._units[i], self._places(i)[0]
        x = self.x[0] if unit.source == IMAGES else self._y[unit.source]
        dz, w = self._dz_of(i), self.copy[weight]
        if operation == "forward" and tile.boxes:
            stats, finds = self._stats[i], training and self._box_sizes[i]
            moments = (stats.first_parts, stats.second_parts) if finds else None
            box_conv(unit.layer, x, w, self._z[i], tile, moments=moments, precision=precision)
        elif operation == "forward":
            forward(unit.layer, x, w, None, self._z[i], None, tile, precision=precision)
        elif operation == "weight_grad" and tile.boxes:
            box_weight_grad(unit.layer, dz, x, self.part(weight), tile, precision=precision)
        elif operation == "weight_grad":
            part = self.part(weight)
            weight_grad(unit.layer, dz, None, x, part, None, self.lanes, tile, precision=precision)
        else:
            readers = [n for n, other in enumerate(self._units) if other.source == unit.source]
            ends = i == readers[0] and self._units[unit.source].relu
            (box_data_grad if tile.boxes else data_grad)(
                unit.layer, dz, w, self._g[unit.source], tile,
                other=self._added_to(unit.source) if i == readers[-1] else self._g[unit.source],
                y=x if ends else None, precision=precision,
            )  # fmt: skip

    def _run_head(self, operation: str, tile: Tile) -> None:
        weight, bias = self.layout.places[-2:]
        head, x, g, precision = self._head, self._pooled, self._g_head, self.precision
        if operation == "forward":
            values = self.copy[weight], self.weights[bias]
            forward(head, x, *values, self.logits, None, tile, precision=precision)
        elif operation == "weight_grad":
            parts = self.part(weight), self.part(bias)
            weight_grad(head, g, None, x, *parts, self.lanes, tile, precision=precision)
        else:
            before = Layer(1, 1, 1, head.in_channels, relu=False)
            input_grad(head, before, g, self.copy[weight], x, None, self._g_pooled, tile, precision=precision)

    @property
    def _shared(self) -> AllLanes | None:
        """How batch norms see all lanes of a step, if they are to."""
        return self.all_lanes if self._sync_norm else None

    def _added_to(self, source: int) -> Tensor | None:
        """The gradient that comes to a unit's output as it is, from the unit that it is added to."""
        found = [i for i, unit in enumerate(self._units) if unit.residual == source]
        return self._g[found[0]] if found else None

    def _dz_of(self, i: int) -> Tensor:
        return self._dz[self._dz_shape(i)]

    def _dz_shape(self, i: int) -> tuple[tuple[int, int, int], tuple[int, int]]:
        """With its border: none if nobody reads past its edge, or by boxes only."""
        layer, tile = self._units[i].layer, self.tiles[i]["input_grad"]
        if tile.boxes or self._units[i].source == IMAGES:
            return layer.out_shape, (0, 0)
        return layer.grad_shape, layer.grad_border

    def _places(self, i: int) -> list[slice]:
        """Weight, gamma, beta, running mean, running variance."""
        return self.layout.places[PER_UNIT * i : PER_UNIT * (i + 1)]

    def _statistics(self, norm: Norm, box: int) -> Statistics:
        lanes, channels = self.lanes, norm.channels
        boxes = -(-norm.rows // min(box, LEAST)) if box else 1
        rows = lanes * norm.part_rows(max(boxes, norm.chunks))
        parts = [self.zeros(rows, channels, dtype=torch.float32) for _ in range(2)]
        means = [self.zeros(lanes, channels, dtype=torch.float32) for _ in range(4)]
        return Statistics(*parts, *means)


def _slots(units: Sequence[Unit], head: Layer, chunks: Sequence[int]) -> list[Slot]:
    """The tensors of all units, then the classifier's weight and bias."""
    slots = []
    for unit, count in zip(units, chunks, strict=False):
        channels = unit.layer.out_channels
        slots += [Slot(unit.layer.depth * channels, count), Slot(channels), Slot(channels)]
        slots += [Slot(channels, is_statistic=True)] * 2
    return [*slots, Slot(head.depth * head.out_channels, chunks[-1]), Slot(head.out_channels, chunks[-1])]


def _norm(unit: Unit, lane_size: int, total_lanes: int) -> Norm:
    (height, width), channels = unit.layer.out_size, unit.layer.out_channels
    chunks = norm_chunks(lane_size * height * width, channels, total_lanes)
    return Norm(height, width, channels, lane_size, chunks, unit.eps, unit.momentum, unit.relu)


def _with_border(units: Sequence[Unit], source: int, shape: tuple[int, int, int]) -> tuple[int, int, int]:
    """A sample's image (H, W, C) with the zeros that those who read it want around it."""
    pads = [unit.layer.pad for unit in units if unit.source == source]
    high, wide = (max((pad[side] for pad in pads), default=0) for side in (0, 1))
    return shape[0] + 2 * high, shape[1] + 2 * wide, shape[2]
