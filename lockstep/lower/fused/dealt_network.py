"""Fused networks whose products are dealt to the workers that share a lane.

Each worker computes its own tiles of a product. Right after it, all of them have the whole result: norms,
pooling and the loss are everyone's, as with one worker. Weight gradients are made whole once their lanes are
summed.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.kernels.triton.conv.fused_layer import Layer
from lockstep.kernels.triton.conv.tile import ALL_TILES, OwnTiles
from lockstep.kernels.triton.conv.tile_table import OPERATIONS
from lockstep.lower.flat_table import KernelNetwork, inside
from lockstep.lower.fused.tile_deal import CHANNELS, COLUMNS, Deal, LaunchSamples, deal_tiles
from lockstep.lower.layer_split import GRADIENTS, InParts, LaneWorkers


class DealtNetwork(KernelNetwork):
    """A network that computes all of every product, until it shares them."""

    _workers: LaneWorkers | None = None
    _deals: dict[tuple[str, int], Deal | None]

    def share_with(self, workers: LaneWorkers | None) -> None:
        if workers is self._workers:
            return
        self._workers, self._deals, size = workers, {}, workers.size if workers else 1
        for operation, i in self._products():
            tile, batch = self.tiles[i][operation], self._batch(operation, i)
            self._deals[operation, i] = deal_tiles(operation, self.layers[i], tile, batch, size)
        for parts in self._parts:  # what others compute stays zero here
            parts.zero_()

    @abstractmethod
    def _products(self) -> list[tuple[str, int]]:
        """The operations that are dealt out: a name of `OPERATIONS` and the number of a layer."""

    def _batch(self, operation: str, i: int) -> LaunchSamples:
        """The samples of an operation."""
        return LaunchSamples(len(self.labels))

    @abstractmethod
    def _weight_places(self, i: int) -> tuple[slice, slice | None]:
        """The places of a layer's weight and bias in the flat tables."""

    def _own(self, operation: str, i: int) -> tuple[slice, OwnTiles]:
        """The samples and the tiles of an operation that this worker computes."""
        deal = self._deals.get((operation, i)) if self._workers else None
        if deal is None or self._workers is None:
            return slice(None), ALL_TILES
        return deal.samples(self._workers.rank), deal.own(self._workers.rank)

    def _is_dealt(self, operation: str, i: int) -> bool:
        return bool(self._workers and self._deals.get((operation, i)))

    def _make_whole(
        self, operation: str, i: int, images: Sequence[Tensor], *tables: tuple[Tensor, int]
    ) -> None:
        """Fill in what others computed: images [N, H, W, C], and tables with so many rows for all samples."""
        deal = self._deals.get((operation, i)) if self._workers else None
        if deal is None or self._workers is None:
            return
        by_channel = deal.axis == CHANNELS
        shared = [InParts(image, 3 if by_channel else 0, deal.ranges()) for image in images]
        for table, rows in tables:
            scale = 1 if by_channel else rows / deal.count
            shared.append(InParts(table[:rows], 1 if by_channel else 0, deal.ranges(scale)))
        self._workers.make_whole(self.layers[i].name, shared)

    def sum_lanes(self, lanes: range, out: Tensor, bad: Tensor) -> None:
        super().sum_lanes(lanes, out, bad)
        if self._workers is None:
            return
        shared: list[InParts] = []
        # weights [CO, taps, CI], and copies with their columns side by side
        lying: list[tuple[Tensor, Tensor]] = []
        for (operation, i), deal in self._deals.items():
            if operation == "weight_grad" and deal:
                layer, (weight, bias) = self.layers[i], self._weight_places(i)
                values = out[weight].view(-1, layer.out_channels, layer.in_channels).transpose(0, 1)
                ranges = deal.ranges()
                if deal.axis == COLUMNS:
                    lying.append((values, values.reshape(layer.out_channels, -1)))
                    shared.append(InParts(lying[-1][1], 1, ranges))
                    ranges = [range(layer.out_channels if 0 in own else 0) for own in ranges]
                else:
                    shared.append(InParts(values, 0, ranges))
                shared += [InParts(out[bias], 0, ranges)] if bias else []
        self._workers.make_whole(GRADIENTS, shared)
        for values, columns in lying:
            if columns.data_ptr() != values.data_ptr():  # of one tap they are the same
                values.copy_(columns.view(values.shape))

    def product_rows(self) -> list[dict[str, Any]]:
        """For each layer: how it is dealt out, its multiplications for a lane, the share that is dealt."""
        rows = []
        for i, layer in enumerate(self.layers):
            (high, wide), work = layer.conv_size, layer.depth * layer.out_channels * self.lane_size
            each = [operation for operation in OPERATIONS if self._is_computed(operation, i)]
            found = {operation: self._deals.get((operation, i)) for operation in each}
            rules = [f"{name} {deal.axis}" for name, deal in found.items() if deal]
            share = sum(deal.share for deal in found.values() if deal) / len(each)
            rows.append(
                {
                    "layer": layer.name,
                    "rule": ", ".join(rules) or "whole",
                    "work_mmac": round(work * high * wide * len(each) / 1e6, 6),
                    "share": round(share, 4),
                }
            )
        return rows

    @abstractmethod
    def _is_computed(self, operation: str, i: int) -> bool:
        """Whether a layer has this operation at all."""


def as_images(values: Tensor, layer: Layer) -> Tensor:
    """The output of a layer [N, PH, PW, CO] in a buffer with a border, or in rows of a next layer's input."""
    if values[0].numel() == torch.Size(layer.out_shape).numel():
        return values.view(len(values), *layer.out_shape)
    return inside(values, *layer.out_size)
