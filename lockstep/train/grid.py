"""The grid of a run (train.bands, train.slices), which its sums follow, and its numerics fingerprint."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from lockstep.data import Store
from lockstep.kernels.loss import Loss
from lockstep.kernels.numerics import check_allocations, failed_allocations, half_type
from lockstep.lower.fixed_lane import fixed_images
from lockstep.lower.program import DeviceLowering
from lockstep.parallel.split.axes import Axes
from lockstep.parallel.split.split_graph import SplitGraph
from lockstep.parallel.split.split_model import grid_facts, split_model
from lockstep.spec import Run
from lockstep.spec.rule.lane_grid import check_grid
from lockstep.train.lane_fingerprint import fingerprint_lane


def find_numerics(
    run: Run,
    model: nn.Module,
    loss: Loss,
    store: Store,
    lowering: DeviceLowering | None,
    *,
    is_own: bool,
    in_stages: bool,
) -> tuple[SplitGraph | None, dict[str, Any]]:
    """The model with its sums in the grid, by one worker, if the run has one; and the run's fingerprint.

    See `fingerprint_lane`; where sums follow a grid, layers are computed one at a time instead of a lane.
    """
    train = run.train
    if train.bands == train.slices == 1:
        lane = fingerprint_lane(run, model, loss, store, lowering, is_own=is_own, in_stages=in_stages)
        shapes = store.train_shapes[:-1]
        sized = [replace(store, shape=shape, sizes=()) for shape in shapes]
        others = [
            fingerprint_lane(run, model, loss, other, None, is_own=is_own, in_stages=in_stages)
            for other in sized
        ]
        return None, {"lane": lane, **({"lane_by_size": others} if others else {})}
    if lowering:
        check_grid(train.bands, train.slices, lowering.program.kernels)
    device, half = next(model.parameters()).device, half_type(train.precision)
    images, failed = fixed_images(run, store.shape, device), failed_allocations(device)
    grid = split_model(model, Axes(train.bands, train.slices), images, half)
    facts = grid_facts(grid, half)
    if train.channels_last:
        facts["memory_format"] = "contiguous"  # see `memory_format`
    check_allocations(device, failed)
    return grid, facts
