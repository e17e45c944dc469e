"""Which algorithm is fastest for which channels, size and kernel: a grid of convolutions, all measured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch

from lockstep.errors import LockstepError
from lockstep.lab.conv.conv_algorithm import CONV_ALGORITHMS, run_conv
from lockstep.lab.conv.conv_bench import ConvTimer, make_operands
from lockstep.lab.conv.conv_layers import network_layers
from lockstep.lab.conv.conv_shape import ConvPass, ConvShape
from lockstep.lab.conv.conv_work import count_operations
from lockstep.measure.probe_device import TimedRounds

MAP_CHANNELS, MAP_SIZES, MAP_KERNELS = (4, 16, 64, 256, 1024), (7, 14, 28, 56, 112), (1, 3, 5, 7, 11)
_MOST_GFLOP = {"cpu": 8.0, "cuda": 4e3}  # of a convolution: larger ones are left out
_PATIENCE_S = 1.0


@dataclass(frozen=True)
class MapCell:
    """One convolution of the grid, with the times of those algorithms that ran."""

    shape: ConvShape
    times: dict[str, TimedRounds]

    @property
    def winner(self) -> str:
        return min(self.times, key=lambda name: self.times[name].median)

    def gain_over(self, algorithm: str) -> float | None:
        """How much faster the winner is than this one."""
        if algorithm not in self.times:
            return None
        return self.times[algorithm].median / self.times[self.winner].median


def measure_map(
    device: torch.device, which: ConvPass, precision: torch.dtype, batch: int, budget_s: float
) -> Iterator[MapCell]:
    """As many channels out as in, padding that keeps the size, stride 1."""
    timer = ConvTimer(device, budget_s, _PATIENCE_S)
    for kernel, size, channels in product(MAP_KERNELS, MAP_SIZES, MAP_CHANNELS):
        shape = ConvShape(batch, channels, channels, size, size, kernel, padding=kernel // 2)
        if 1e-9 * shape.operations > _MOST_GFLOP[device.type]:
            continue
        operands = make_operands(shape, which, precision, device)
        times = dict[str, TimedRounds]()
        for algorithm in CONV_ALGORITHMS:
            with suppress(LockstepError):
                operations = count_operations(algorithm, shape, which)
                call = partial(run_conv, algorithm, shape, which, *operands)
                times[algorithm.name], _ = timer.time(algorithm.name, which, operations, call)
        if times:
            yield MapCell(shape, times)


def network_points() -> dict[str, list[tuple[int, float, int]]]:
    """Kernel, mean of channels in and out (geometric, of a group), and side of the result, of every layer."""
    return {
        name: [
            (
                shape.kernel,
                (shape.weight_size[1] * shape.out_channels / shape.groups) ** 0.5,
                shape.result_size[3],
            )
            for shape in layers
        ]
        for name, layers in network_layers().items()
    }
