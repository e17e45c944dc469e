"""Executes a fused residual network in eval mode, on the blocks of images that it is given.

A unit whose tile is a TMA box takes one launch, with its norm, residual and ReLU; other units take two. The
output buffer of a unit is reused by a later unit of the same shape once no other unit reads it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.kernels.triton.conv.fused_forward import forward
from lockstep.kernels.triton.conv.fused_layer import Layer
from lockstep.kernels.triton.conv.tile import KERNEL_TYPES
from lockstep.kernels.triton.conv.tile_table import Table
from lockstep.kernels.triton.conv.tma_box import takes_boxes
from lockstep.kernels.triton.conv.tma_forward import Ending, box_conv
from lockstep.kernels.triton.norm.norm_forward import apply
from lockstep.kernels.triton.norm.pixel_average import average
from lockstep.lower.eval_network import ScoreBuffers
from lockstep.lower.flat_table import Layout, fill_inside
from lockstep.lower.fused.residual_unit import IMAGES, PER_UNIT, Unit, make_norm, make_slots, with_border
from lockstep.spec import Train

_Shape = tuple[int, int, int]


class ResidualEval(ScoreBuffers):
    """`lanes` blocks of `lane_size` images through units and a classifier, which the last part has."""

    def __init__(
        self,
        units: Sequence[Unit],
        head: Layer | None,
        lanes: int,
        train: Train,
        device: torch.device,
        table: Table,
    ) -> None:
        self._units, self._head, self._device = list(units), head, device
        layers = [unit.layer for unit in units] + ([head] if head else [])
        classes = layers[-1].out_channels
        super().__init__(lanes, train.batch // train.lanes, classes, train.label_smoothing, device)
        self._dtype, self._precision = KERNEL_TYPES[train.precision]
        self._tiles = [table.tiles(layer, train.precision)["forward"] for layer in layers]
        self.layout = Layout(make_slots(units, head, [1] * len(layers)))
        self.make_weights()
        count, first = len(self.labels), units[0].layer
        images = first.height, first.width, first.in_channels
        self.x = [self._zeros(count, *with_border(units, IMAGES, images))]
        self._norms = [make_norm(unit, count, 1) for unit in units]
        self._y, self._z = self._share_buffers(count)
        self._pooled = self._zeros(count, *head.in_shape) if head else None

    @property
    def pad(self) -> tuple[int, int]:
        """The border that the first layer reads."""
        return self._units[0].layer.pad

    def make_weights(self) -> None:
        """Make the tables of weights."""
        self.weights, self.copy = self._zeros(self.layout.size, single=True), self._zeros(self.layout.size)

    def drop_tables(self) -> None:
        """Free the weights until `make_weights`."""
        self.weights = self.copy = self._zeros(0)

    def fold(self) -> None:
        """Replace each norm's gamma and beta by the factor and shift that it applies to its convolution."""
        for i, unit in enumerate(self._units):
            _, gamma, beta, mean, var = (self.weights[place] for place in self._places(i))
            gamma /= torch.sqrt(var + unit.eps)
            beta -= mean * gamma

    def forward(self, training: bool = False) -> None:
        """x[0] → logits, or the output of a part."""
        assert not training
        for i, unit in enumerate(self._units):
            tile, (place, *both, _, _) = self._tiles[i], self._places(i)
            weight, factor, shift = self.copy[place], *(self.weights[each] for each in both)
            x = self._output(unit.source)
            residual = None if unit.residual is None else self._output(unit.residual)
            if i in self._z:
                forward(unit.layer, x, weight, None, self._z[i], None, tile, precision=self._precision)
                apply(self._norms[i], self._z[i], factor, shift, self._y[i], residual, self._norms[i].rows)
            else:
                ending = Ending(factor, shift, residual, unit.relu)
                box_conv(unit.layer, x, weight, self._y[i], tile, ending=ending, precision=self._precision)
        if self._head is None or self._pooled is None:
            return
        average(self._norms[-1], self._y[-1], self._pooled)
        values = self.copy[self.layout.places[-2]], self.weights[self.layout.places[-1]]
        given, tile = (self._pooled, *values, self.logits), self._tiles[-1]
        forward(self._head, *given, None, tile, precision=self._precision)

    def enter(self, given: Sequence[Tensor]) -> None:
        """Take images, or the output of the part before."""
        fill_inside(self.x[0], given[0])

    def leave(self) -> list[Tensor]:
        """The output of a part."""
        return [self._y[-1].clone()]

    def _output(self, source: int) -> Tensor:
        return self.x[0] if source == IMAGES else self._y[source]

    def _share_buffers(self, count: int) -> tuple[list[Tensor], dict[int, Tensor]]:
        """Buffers for the outputs of all units, and for the convolutions of units without boxes."""
        given: list[Tensor] = []
        readers = {  # the last reader of each unit's output
            before: i
            for i, unit in enumerate(self._units)
            for before in (unit.source, unit.residual)
            if before is not None and before != IMAGES
        }
        between: dict[int, Tensor] = {}
        # Unused buffers by the shapes of their image without and with border: no kernel writes a border.
        free: dict[tuple[_Shape, _Shape], list[Tensor]] = defaultdict(list)
        shapes = [
            (unit.layer.out_shape, with_border(self._units, i, unit.layer.out_shape))
            for i, unit in enumerate(self._units)
        ]
        for i, unit in enumerate(self._units):
            own = free[shapes[i]]
            given.append(own.pop() if own else self._zeros(count, *shapes[i][1]))
            for before in (before for before, last in readers.items() if last == i):
                free[shapes[before]].append(given[before])
            if not (self._tiles[i].boxes and takes_boxes("forward", unit.layer, self._tiles[i])):
                shape = unit.layer.out_shape
                own = [z for z in between.values() if z.shape[1:] == shape]
                between[i] = own[0] if own else self._zeros(count, *shape)
        return given, between

    def _places(self, i: int) -> list[slice]:
        """Weight, gamma, beta, running mean, running variance."""
        return self.layout.places[PER_UNIT * i : PER_UNIT * (i + 1)]

    def _zeros(self, *shape: int, single: bool = False) -> Tensor:
        return torch.zeros(shape, dtype=torch.float32 if single else self._dtype, device=self._device)
