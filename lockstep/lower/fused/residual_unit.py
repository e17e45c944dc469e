"""Fused residual network, its units: a convolution with its batch norm, and which unit's output it reads.

In a pipeline a network has some of the units, and `Around` says what is before and after them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lockstep.kernels.triton.conv.fused_layer import Layer
from lockstep.kernels.triton.conv.tile import Tile, lane_chunks
from lockstep.kernels.triton.conv.tile_table import OPERATIONS, Table
from lockstep.kernels.triton.conv.tma_box import holds_lanes, takes_boxes
from lockstep.kernels.triton.norm.norm_forward import Norm, norm_chunks
from lockstep.lower.flat_table import Slot
from lockstep.spec import Train

IMAGES = -1  # as a source: the input of the network, which is images or the output of the unit before
PER_UNIT = 5  # tensors of a unit: weight, gamma, beta, and the running mean and variance


@dataclass(frozen=True)
class Unit:
    """A convolution without bias and its norm; it reads unit `source` and adds unit `residual`."""

    layer: Layer
    source: int
    residual: int | None
    relu: bool
    eps: float
    momentum: float

    def called(self, name: str) -> Unit:
        """The same unit with the name of its convolution."""
        return replace(self, layer=replace(self.layer, name=name))

    def counted_from(self, first: int) -> Unit:
        """The same unit where unit `first` has number 0, so that the one before it is the input."""
        residual = None if self.residual is None else self.residual - first
        return replace(self, source=self.source - first, residual=residual)


@dataclass(frozen=True)
class Around:
    """The unit whose output a part of the units reads, and the first unit that reads the output of its last.

    Neither is there around all units.
    """

    before: Unit | None = None
    after: Unit | None = None


def fit_tiles(layer: Layer, has_input_grad: bool, table: Table, train: Train) -> tuple[dict[str, Tile], int]:
    """The tiles of a unit's operations, without boxes where these do not fit; chunks of a weight gradient."""
    tiles, lane_size = table.tiles(layer, train.precision), train.batch // train.lanes
    chunks = lane_chunks(tiles["weight_grad"].parts, train.lanes, lane_size)
    for name in OPERATIONS:
        tile = tiles[name]
        fits = tile.boxes and takes_boxes(name, layer, tile, lane_size, chunks)
        if name == "weight_grad":  # with boxes it reads a dz without border
            fits = fits and not has_border(layer, has_input_grad, tiles)
        tiles[name] = replace(tile, boxes=fits)
    return tiles, chunks


def has_border(layer: Layer, has_input_grad: bool, tiles: dict[str, Tile]) -> bool:
    """Whether the data gradient reads past the edges of dz."""
    return has_input_grad and not tiles["input_grad"].boxes and layer.grad_border != (0, 0)


def summed_pixels(operation: str, layer: Layer, tiles: dict[str, Tile], lane_size: int) -> int:
    """The pixels of a box if this operation also sums over boxes, each of one lane; else 0."""
    tile = tiles[operation]
    return tile.rows if tile.boxes and holds_lanes(operation, layer, tile, lane_size) else 0


def readers(units: Sequence[Unit], source: int) -> list[int]:
    """The numbers of the units whose convolution reads the output of unit `source`, in rising order.

    The backward pass runs in reverse, so the first of them is the last to add to the gradient of that output.
    """
    return [i for i, unit in enumerate(units) if unit.source == source]


def make_slots(units: Sequence[Unit], head: Layer | None, chunks: Sequence[int]) -> list[Slot]:
    """Slots for the tensors of all units, then for the classifier's weight and bias, if it is there."""
    slots = []
    for unit, count in zip(units, chunks, strict=False):
        channels = unit.layer.out_channels
        slots += [Slot(unit.layer.depth * channels, count), Slot(channels), Slot(channels)]
        slots += [Slot(channels, is_statistic=True)] * 2
    if head is None:
        return slots
    return [*slots, Slot(head.depth * head.out_channels, chunks[-1]), Slot(head.out_channels, chunks[-1])]


def make_norm(unit: Unit, lane_size: int, total_lanes: int) -> Norm:
    (height, width), channels = unit.layer.out_size, unit.layer.out_channels
    chunks = norm_chunks(lane_size * height * width, channels, total_lanes)
    return Norm(height, width, channels, lane_size, chunks, unit.eps, unit.momentum, unit.relu)


def with_border(units: Sequence[Unit], source: int, shape: tuple[int, int, int]) -> tuple[int, int, int]:
    """The shape (H, W, C) of a unit's output with the border of zeros that the units which read it need."""
    pads = [unit.layer.pad for unit in units if unit.source == source]
    high, wide = (max((pad[side] for pad in pads), default=0) for side in (0, 1))
    return shape[0] + 2 * high, shape[1] + 2 * wide, shape[2]
