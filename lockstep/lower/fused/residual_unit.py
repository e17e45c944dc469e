"""Fused residual network, its units: what each reads, and what its tensors and norm are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.kernels.triton.conv.fused_layer import Layer
from lockstep.kernels.triton.norm.norm_forward import Norm, norm_chunks
from lockstep.lower.flat_table import Slot

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


def readers(units: Sequence[Unit], source: int) -> list[int]:
    """The units that convolve a unit's output; the first one is the last to add to its gradient."""
    return [i for i, unit in enumerate(units) if unit.source == source]


def make_slots(units: Sequence[Unit], head: Layer, chunks: Sequence[int]) -> list[Slot]:
    """The tensors of all units, then the classifier's weight and bias."""
    slots = []
    for unit, count in zip(units, chunks, strict=False):
        channels = unit.layer.out_channels
        slots += [Slot(unit.layer.depth * channels, count), Slot(channels), Slot(channels)]
        slots += [Slot(channels, is_statistic=True)] * 2
    return [*slots, Slot(head.depth * head.out_channels, chunks[-1]), Slot(head.out_channels, chunks[-1])]


def make_norm(unit: Unit, lane_size: int, total_lanes: int) -> Norm:
    (height, width), channels = unit.layer.out_size, unit.layer.out_channels
    chunks = norm_chunks(lane_size * height * width, channels, total_lanes)
    return Norm(height, width, channels, lane_size, chunks, unit.eps, unit.momentum, unit.relu)


def with_border(units: Sequence[Unit], source: int, shape: tuple[int, int, int]) -> tuple[int, int, int]:
    """A sample's image (H, W, C) with the zeros that those who read it want around it."""
    pads = [unit.layer.pad for unit in units if unit.source == source]
    high, wide = (max((pad[side] for pad in pads), default=0) for side in (0, 1))
    return shape[0] + 2 * high, shape[1] + 2 * wide, shape[2]
