"""Fused residual network, its products: the three of every convolution, and those of the classifier.

With other workers, each computes its own tiles of the convolutions; what a kernel sums of its result for a
norm, box by box, goes along with the result. The classifier is everyone's.

Legend: as in `residual_network`.
"""

from __future__ import annotations

from torch import Tensor

from lockstep.kernels.triton.conv.fused_forward import forward
from lockstep.kernels.triton.conv.fused_gradient import input_grad, weight_grad
from lockstep.kernels.triton.conv.fused_layer import Layer
from lockstep.kernels.triton.conv.strided_gradient import data_grad
from lockstep.kernels.triton.conv.tile import Tile
from lockstep.kernels.triton.conv.tile_table import OPERATIONS
from lockstep.kernels.triton.conv.tma_forward import box_conv
from lockstep.kernels.triton.conv.tma_gradient import box_data_grad, box_weight_grad
from lockstep.kernels.triton.norm.norm_moments import Statistics
from lockstep.lower.fused.dealt_network import DealtNetwork
from lockstep.lower.fused.residual_unit import IMAGES, PER_UNIT, Unit, readers
from lockstep.lower.fused.tile_deal import LaunchSamples


class ResidualProducts(DealtNetwork):
    """The convolutions of units and the classifier, on the buffers of a `ResidualNetwork`."""

    _units: list[Unit]
    _head: Layer | None
    _stats: list[Statistics]
    _box_sizes: list[int]  # pixels of a box whose moments the forward pass writes; 0: none
    _sum_sizes: list[int]  # likewise of sums for the gradient of a unit's norm
    _y: list[Tensor]
    _z: list[Tensor]
    _g: list[Tensor]
    _dz: list[Tensor]
    _pooled: Tensor
    _g_pooled: Tensor
    _g_head: Tensor

    def run(self, operation: str, i: int) -> None:
        """Launch one operation of the convolution of unit i, or of the classifier, which comes last."""
        if i == len(self._units):
            self._run_head(operation, self.tiles[i][operation])
        elif operation == "forward":
            self._run_forward(i)
        elif operation == "weight_grad":
            self._run_weight_grad(i)
        else:
            self._run_input_grad(i)

    def _run_forward(self, i: int) -> None:
        layer, tile, z, (n, own) = (
            self.layers[i],
            self.tiles[i]["forward"],
            self._z[i],
            self._own("forward", i),
        )
        x, w, stats = self._output(self._units[i].source), self.copy[self._places(i)[0]], self._stats[i]
        size = self._box_sizes[i]
        tables = (stats.first_parts, stats.second_parts) if size else ()
        if own.is_empty:
            pass
        elif tile.boxes:
            box_conv(layer, x, w, z, tile, moments=tables or None, precision=self.precision, own=own)
        else:
            forward(layer, x[n], w, None, z[n], None, tile, precision=self.precision, own=own)
        rows = z[..., 0].numel() // size if size else 0
        self._make_whole("forward", i, [z], *((table, rows) for table in tables))

    def _run_weight_grad(self, i: int) -> None:
        layer, tile, own = self.layers[i], self.tiles[i]["weight_grad"], self._own("weight_grad", i)[1]
        x, dz, part = self._output(self._units[i].source), self._dz[i], self.part(self._places(i)[0])
        if own.is_empty:
            pass
        elif tile.boxes:
            box_weight_grad(layer, dz, x, part, tile, precision=self.precision, own=own)
        else:
            weight_grad(layer, dz, None, x, part, None, self.lanes, tile, precision=self.precision, own=own)

    def _run_input_grad(self, i: int) -> None:
        layer, tile, (n, own) = self.layers[i], self.tiles[i]["input_grad"], self._own("input_grad", i)
        source, dz, w = self._units[i].source, self._dz[i], self.copy[self._places(i)[0]]
        by, g, norm = readers(self._units, source), self._grad(source), self._norm_of_grad(i)
        other = self._added_to(source) if i == by[-1] else g
        y = self._output(source) if i == by[0] and self._unit(source).relu else None
        if own.is_empty:
            pass
        elif tile.boxes:
            box_data_grad(
                layer, dz, w, g, tile, other=other, y=y, norm=norm, precision=self.precision, own=own
            )
        else:
            other, y = (None if image is None else image[n] for image in (other, y))
            data_grad(layer, dz[n], w, g[n], tile, other=other, y=y, precision=self.precision, own=own)
        tables = (norm[1].first_parts, norm[1].second_parts) if norm else ()
        rows = g[..., 0].numel() // tile.rows
        self._make_whole("input_grad", i, [g], *((table, rows) for table in tables))

    def _norm_of_grad(self, i: int) -> tuple[Tensor, Statistics] | None:
        """The norm before a unit, if its data gradient is complete with it and also sums for that norm."""
        source, tile = self._units[i].source, self.tiles[i]["input_grad"]
        is_last = i == readers(self._units, source)[0]
        return self._summed_norm(source) if tile.boxes and is_last else None

    def _run_head(self, operation: str, tile: Tile) -> None:
        weight, bias = self.layout.places[-2:]
        assert self._head
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

    def _products(self) -> list[tuple[str, int]]:
        every = range(len(self._units))
        return [(name, i) for i in every for name in OPERATIONS if self._is_computed(name, i)]

    def _is_computed(self, operation: str, i: int) -> bool:
        is_head = i == len(self._units)
        return operation != "input_grad" or is_head or self._has_input_grad(self._units[i])

    def _batch(self, operation: str, i: int) -> LaunchSamples:
        """Sums of a strided data gradient lie by its kinds of pixels, so they are dealt by whole lanes."""
        by_lane = (
            operation == "input_grad" and self.layers[i].stride > 1 and self._norm_of_grad(i) is not None
        )
        return LaunchSamples(len(self.labels), self.lane_size if by_lane else 1)

    def _weight_places(self, i: int) -> tuple[slice, slice | None]:
        return self._places(i)[0], None

    def _added_to(self, source: int) -> Tensor | None:
        """The gradient that a unit's output gets through the residual: the g of the unit it is added to."""
        found = [i for i, unit in enumerate(self._units) if unit.residual == source]
        return self._g[found[0]] if found else None

    def _has_input_grad(self, unit: Unit) -> bool:
        """Whether the gradient of what a unit reads is needed; images need none."""
        return unit.source != IMAGES

    def _output(self, source: int) -> Tensor:
        """The y of a unit, or the input of the network."""
        return self.x[0] if source == IMAGES else self._y[source]

    def _unit(self, source: int) -> Unit:
        return self._units[source]

    def _grad(self, source: int) -> Tensor:
        return self._g[source]

    def _summed_norm(self, source: int) -> tuple[Tensor, Statistics] | None:
        """The z and the statistics of a norm whose gradient needs sums of g by boxes."""
        return (self._z[source], self._stats[source]) if self._sum_sizes[source] else None

    def _places(self, i: int) -> list[slice]:
        """Weight, gamma, beta, running mean, running variance."""
        return self.layout.places[PER_UNIT * i : PER_UNIT * (i + 1)]
