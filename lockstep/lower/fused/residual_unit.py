"""Fused residual network, its units: a convolution with its batch norm, and which unit's output it reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.kernels.triton.conv.fused_layer import Layer
from lockstep.kernels.triton.norm.norm_forward import Norm, norm_chunks
from lockstep.lower.flat_table import Slot

IMAGES = -1  # as a source: the images, the input of the network
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


def readers(units: Sequence[Unit], source: int) -> list[int]:
    """The numbers of the units whose convolution reads the output of unit `source`, in rising order.

    The backward pass runs in reverse, so the first of them is the last to add to the gradient of that output.
    """
    return [i for i, unit in enumerate(units) if unit.source == source]


def make_slots(units: Sequence[Unit], head: Layer, chunks: Sequence[int]) -> list[Slot]:
    """Slots for the tensors of all units, then for the classifier's weight and bias."""
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
    """The shape (H, W, C) of a unit's output with the border of zeros that the units which read it need."""
    pads = [unit.layer.pad for unit in units if unit.source == source]
    high, wide = (max((pad[side] for pad in pads), default=0) for side in (0, 1))
    return shape[0] + 2 * high, shape[1] + 2 * wide, shape[2]
