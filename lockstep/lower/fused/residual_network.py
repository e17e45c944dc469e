"""Executes a fused residual network in training: forward pass, loss and backward pass of all lanes.

A gradient's path begins here: backward → lane tree. A network is a sequence of units, then the mean over
pixels and a classifier. A unit is a convolution and a batch norm by lane, optionally with the output of
another unit added, optionally with a ReLU.

Legend: z is the output of a convolution, y the output of a unit, g the gradient of the input of its ReLU, dz
the gradient of z. A unit that is only added to another unit (a projection) shares the g of that unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from lockstep.kernels.cuda_stream import beside
from lockstep.kernels.triton.conv.fused_layer import Layer
from lockstep.kernels.triton.conv.tile import lane_chunks
from lockstep.kernels.triton.conv.tile_table import Table
from lockstep.kernels.triton.conv.tma_box import LEAST
from lockstep.kernels.triton.norm.norm_forward import Norm, apply
from lockstep.kernels.triton.norm.norm_gradient import norm_grad
from lockstep.kernels.triton.norm.norm_moments import AllLanes, Statistics, find_moments, statistics
from lockstep.kernels.triton.norm.pixel_average import average, spread
from lockstep.lower.fused.residual_product import ResidualProducts
from lockstep.lower.fused.residual_unit import (
    IMAGES,
    Unit,
    fit_tiles,
    has_border,
    make_norm,
    make_slots,
    readers,
    summed_pixels,
    with_border,
)
from lockstep.spec import Train


class ResidualNetwork(ResidualProducts):
    """Runs `lanes` lanes of `lane_size` samples through units and a classifier.

    In a pipeline it is a `ResidualPart`, and only the last one has the classifier.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        head: Layer | None,
        lanes: int,
        train: Train,
        device: torch.device,
        table: Table,
    ) -> None:
        self._units, self._head, self._sync_norm = list(units), head, train.sync_norm
        lane_size = train.batch // train.lanes
        self.layers = [unit.layer for unit in units]
        fitted = [fit_tiles(unit.layer, self._has_input_grad(unit), table, train) for unit in units]
        if head:
            self.layers.append(head)
            tiles = table.tiles(head, train.precision)
            fitted.append((tiles, lane_chunks(tiles["weight_grad"].parts, train.lanes, lane_size)))
        self.tiles, chunks = [tiles for tiles, _ in fitted], [chunks for _, chunks in fitted]
        super().__init__(make_slots(units, head, chunks), self.layers[-1].out_channels, lanes, train, device)
        count = len(self.labels)
        self._norms = [make_norm(unit, lane_size, train.lanes) for unit in units]
        every = range(len(units))
        self._box_sizes = [self._summed("forward", i) for i in every]
        self._sum_sizes = [self._find_sum_size(i, table, train) for i in every]
        self._stats = [
            self._statistics(self._norms[i], self._box_sizes[i], self._sum_sizes[i]) for i in every
        ]
        first = units[0].layer
        images = first.height, first.width, first.in_channels
        self.x = [self.zeros(count, *with_border(units, IMAGES, images))]
        outputs = [unit.layer.out_shape for unit in units]
        self._y = [self.zeros(count, *with_border(units, i, shape)) for i, shape in enumerate(outputs)]
        self._z, self._g = [], []
        for unit in units:
            self._z.append(self.zeros(count, *unit.layer.out_shape))
            self._g.append(self.zeros(count, *unit.layer.out_shape))
        for i, unit in enumerate(units):
            if unit.residual is not None and unit.residual != IMAGES and not readers(units, unit.residual):
                self._g[unit.residual] = self._g[i]
        self._dz = [self._make_dz(i) for i in every]
        self.keys = self.zeros(0, lanes, dtype=torch.int64)
        if head:
            self._pooled, self._g_pooled = (self.zeros(count, *head.in_shape) for _ in range(2))
            self._g_head = self.zeros(count, 1, 1, head.out_channels)

    def _find_sum_size(self, i: int, table: Table, train: Train) -> int:
        """The pixels of a box if the kernel that completes the g of unit i also sums over boxes; else 0.

        The backward pass runs through the units in reverse, so the first unit that reads unit i is the last
        one to add to its g.
        """
        by = readers(self._units, i)
        return self._summed("input_grad", by[0]) if by else 0

    def _summed(self, operation: str, i: int) -> int:
        return summed_pixels(operation, self._units[i].layer, self.tiles[i], self.lane_size)

    def forward(self) -> None:
        """x[0] and the weights' copy → logits, or the y of a part, with the statistics of each lane."""
        for i in range(len(self._units)):
            self.run("forward", i)
            self.norm(i)
        if self._head is None:
            return
        average(self._norms[-1], self._y[-1], self._pooled)
        self.run("forward", len(self._units))

    def norm(self, i: int) -> None:
        """Compute the statistics of a unit's z, then y from z."""
        norm, z, stats, residual = self._norms[i], self._z[i], self._stats[i], self._units[i].residual
        _, gamma, beta, mean, var = (self.weights[place] for place in self._places(i))
        out = [self.part(place) for place in self._places(i)[-2:]]
        if not self._box_sizes[i]:
            find_moments(norm, z, stats)
        statistics(norm, self._box_sizes[i], gamma, beta, (mean, var), (out[0], out[1]), stats, self._shared)
        added = None if residual is None else self._output(residual)
        apply(norm, z, stats.factor, stats.shift, self._y[i], added, norm.rows)

    def score(self) -> None:
        self.score_into(self._g_head)

    def backward(self) -> None:
        if self._head:
            self.score_into(self._g_head, self._class_weights)
            self.average_scores()
        # Norms wait for memory; weight gradients use that time, on a stream of low priority.
        with beside(self._device, gives_way=True) as launch:
            if self._head:
                launch(partial(self.run, "weight_grad", len(self._units)))
                self.run("input_grad", len(self._units))
                spread(self._norms[-1], self._g_pooled, self._y[-1], self._g[-1])
            for i in reversed(range(len(self._units))):
                self.norm_grad(i)
                launch(partial(self.run, "weight_grad", i))
                if self._has_input_grad(self._units[i]):
                    self.run("input_grad", i)

    def norm_grad(self, i: int) -> None:
        """Compute a unit's dz and the gradients of gamma and beta, from g and z."""
        _, gamma, beta, _, _ = self._places(i)
        parts = self.part(gamma), self.part(beta)
        norm, dz, size = self._norms[i], self._dz[i], self._sum_sizes[i]
        known = norm.rows // size if size else 0
        norm_grad(norm, self._g[i], self._z[i], self._stats[i], *parts, dz, self._shared, known)

    @property
    def _shared(self) -> AllLanes | None:
        """The function that gathers the statistics of all lanes of a step, if batch norms share them."""
        return self.all_lanes if self._sync_norm else None

    def _make_dz(self, i: int) -> Tensor:
        """The buffer of dz: that of z, which is not read any more, unless dz needs a border."""
        unit = self._units[i]
        bordered = has_border(unit.layer, self._has_input_grad(unit), self.tiles[i])
        return self.zeros(len(self.labels), *unit.layer.grad_shape) if bordered else self._z[i]

    def _statistics(self, norm: Norm, *box_sizes: int) -> Statistics:
        """The buffers of a unit's statistics, with room for its chunks and boxes, forward and backward."""
        lanes = self.lanes
        boxes = [-(-norm.rows // min(size, LEAST)) for size in box_sizes if size]
        rows = lanes * norm.part_rows(max(norm.chunks, *boxes, 1))
        parts = [self.zeros(rows, norm.channels, dtype=torch.float32) for _ in range(2)]
        means = [self.zeros(lanes, norm.channels, dtype=torch.float32) for _ in range(4)]
        return Statistics(*parts, *means)
