"""How the tiles of a fused product are dealt to the workers that share a lane.

A tile is the same program whoever computes it, and a sample has the same bits in any batch. So no deal can
change a bit. A product is dealt by tiles of channels, or by samples, or, of a weight gradient, by columns:
whichever leaves the least to the worker that has the most.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from lockstep.comm.tree import worker_lanes
from lockstep.kernels.triton.conv.fused_layer import Layer
from lockstep.kernels.triton.conv.tile import OwnTiles, Tile
from lockstep.kernels.triton.conv.tma_box import find_box, neighbours

CHANNELS, SAMPLES, COLUMNS = "channels", "samples", "columns"


@dataclass(frozen=True)
class Deal:
    """`count` values along an axis in units that are not cut, dealt to workers as evenly as these allow."""

    axis: str
    count: int
    unit: int
    workers: int
    tiles: int = 1  # of a launch, for each unit

    @cached_property
    def units(self) -> list[range]:
        """The units of every worker."""
        return [worker_lanes(-(-self.count // self.unit), self.workers, n) for n in range(self.workers)]

    def ranges(self, scale: float = 1) -> list[range]:
        """The values of every worker; with a scale, the rows of a table with so many for each value."""
        ends = [[min(end * self.unit, self.count) for end in (own.start, own.stop)] for own in self.units]
        return [range(round(first * scale), round(stop * scale)) for first, stop in ends]

    @property
    def most(self) -> float:
        """The share of the worker that has the most."""
        return max(map(len, self.ranges())) / self.count

    @property
    def share(self) -> float:
        """How much of the product is dealt out: 1 if every worker has the same part, 0 if one has all."""
        return (1 - self.most) / (1 - 1 / self.workers)

    def samples(self, rank: int) -> slice:
        """The samples of a worker."""
        own = self.ranges()[rank]
        return slice(own.start, own.stop) if self.axis == SAMPLES else slice(None)

    def own(self, rank: int) -> OwnTiles:
        """The tiles of a worker."""
        own = range(self.units[rank].start * self.tiles, self.units[rank].stop * self.tiles)
        return OwnTiles(channels=own) if self.axis == CHANNELS else OwnTiles(across=own)


@dataclass(frozen=True)
class LaunchSamples:
    """The samples of a launch; those of a unit are computed together, 1 or those of a lane."""

    samples: int
    unit: int = 1


def deal_tiles(operation: str, layer: Layer, tile: Tile, batch: LaunchSamples, workers: int) -> Deal | None:
    """How a product is dealt out; None if every worker computes all of it."""
    if operation == "weight_grad":
        found = [Deal(CHANNELS, layer.out_channels, tile.rows, workers), _columns(layer, tile, workers)]
    else:
        channels = layer.out_channels if operation == "forward" else layer.in_channels
        by_samples = _samples(operation, layer, tile, batch, workers)
        found = [Deal(CHANNELS, channels, tile.cols, workers), by_samples]
    best = min(found, key=lambda deal: deal.most)
    return best if best.most < 1 else None


def _columns(layer: Layer, tile: Tile, workers: int) -> Deal:
    """Columns of the weight; a program with boxes may have those of three neighbouring taps."""
    together = neighbours(layer, tile) if tile.boxes else 1
    if together == 1:
        return Deal(COLUMNS, layer.depth, tile.cols, workers)
    channels = layer.in_channels
    return Deal(COLUMNS, layer.depth, together * channels, workers, tiles=channels // tile.cols)


def _samples(operation: str, layer: Layer, tile: Tile, batch: LaunchSamples, workers: int) -> Deal:
    """Samples; with boxes, all of those that a box has pixels of."""
    if not tile.boxes:
        return Deal(SAMPLES, batch.samples, batch.unit, workers)
    stride = layer.stride if operation == "input_grad" else 1
    high, wide = (
        layer.conv_size if operation == "forward" else (layer.height // stride, layer.width // stride)
    )
    box = find_box(tile.rows, high, wide)
    unit = max(batch.unit, box.images)
    boxes = unit // box.images * (high // box.rows) * (wide // box.cols)
    return Deal(SAMPLES, batch.samples, unit, workers, tiles=boxes)
