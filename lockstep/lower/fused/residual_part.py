"""Executes a part of a fused residual network in training, as a stage of a pipeline.

It gets the y of the unit before, and the g of its own last unit. If the kernel that completes a g also sums
it for the gradient of the norm before, which is in the other part, then z and its mean and rate go along with
y, and the sums come back with g.

Legend: as in `residual_network`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.kernels.triton.conv.fused_layer import Layer
from lockstep.kernels.triton.conv.tile_table import Table
from lockstep.kernels.triton.norm.norm_moments import Statistics
from lockstep.lower.fused.residual_network import ResidualNetwork
from lockstep.lower.fused.residual_unit import (
    IMAGES,
    Around,
    Unit,
    fit_tiles,
    make_norm,
    readers,
    summed_pixels,
)
from lockstep.spec import Train


class ResidualPart(ResidualNetwork):
    """Some units, one after another, and the classifier if they are the last ones."""

    def __init__(
        self,
        units: Sequence[Unit],
        head: Layer | None,
        around: Around,
        lanes: int,
        train: Train,
        device: torch.device,
        table: Table,
    ) -> None:
        self._around = around
        super().__init__(units, head, lanes, train, device, table)
        if around.before is None:
            return
        count, shape = len(self.labels), around.before.layer.out_shape
        norm = make_norm(around.before, self.lane_size, train.lanes)
        size = self._summed("input_grad", readers(self._units, IMAGES)[0])
        self._g_in, self._num_sums = self.zeros(count, *shape), norm.rows // size if size else 0
        if size:
            self._z_in, self._stats_in = self.zeros(count, *shape), self._statistics(norm, size)

    def enter(self, given: Sequence[Tensor]) -> None:
        super().enter(given)
        if len(given) > 1:
            stats = self._stats_in
            for buffer, arrived in zip((self._z_in, stats.mean, stats.rate), given[1:], strict=True):
                buffer.copy_(arrived)

    def leave(self) -> list[Tensor]:
        stats = self._stats[-1]
        also = [self._z[-1], stats.mean, stats.rate] if self._sum_sizes[-1] else []
        return [tensor.clone() for tensor in (self._y[-1], *also)]

    def enter_back(self, given: Sequence[Tensor]) -> None:
        self._g[-1].copy_(given[0])
        stats = self._stats[-1]
        for parts, sums in zip((stats.first_parts, stats.second_parts), given[1:], strict=False):
            parts[: len(sums)].copy_(sums)

    def leave_back(self) -> list[Tensor]:
        sums = []
        if self._num_sums:
            stats, rows = self._stats_in, self.lanes * self._num_sums
            sums = [stats.first_parts[:rows], stats.second_parts[:rows]]
        return [tensor.clone() for tensor in (self._g_in, *sums)]

    def _find_sum_size(self, i: int, table: Table, train: Train) -> int:
        after = self._around.after
        if after is None or i < len(self._units) - 1:
            return super()._find_sum_size(i, table, train)
        tiles, _ = fit_tiles(after.layer, True, table, train)
        return summed_pixels("input_grad", after.layer, tiles, self.lane_size)

    def _has_input_grad(self, unit: Unit) -> bool:
        return unit.source != IMAGES or self._around.before is not None

    def _unit(self, source: int) -> Unit:
        before = self._around.before
        return before if source == IMAGES and before else super()._unit(source)

    def _grad(self, source: int) -> Tensor:
        return self._g_in if source == IMAGES else super()._grad(source)

    def _summed_norm(self, source: int) -> tuple[Tensor, Statistics] | None:
        if source == IMAGES:
            return (self._z_in, self._stats_in) if self._num_sums else None
        return super()._summed_norm(source)
