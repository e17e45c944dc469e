"""The run's part of the numerics fingerprint: a hash of one lane by its own kernels; others are refused.

It is part of the identity, so a worker whose lane has other bits is refused before the first step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lockstep.data import Store
from lockstep.kernels.loss import Loss, WholeLoss
from lockstep.kernels.numerics import (
    check_allocations,
    failed_allocations,
    half_type,
    memory_format,
)
from lockstep.kernels.structure import place
from lockstep.lower.fixed_lane import fixed_labels, fixed_samples, run_fixed_lane
from lockstep.lower.lane_by_lane import LaneByLane
from lockstep.lower.program import DeviceLowering
from lockstep.measure.machine_fingerprint import lane_hash
from lockstep.spec import Run
from lockstep.train.preflight import is_out_of_memory


def fingerprint_lane(
    run: Run,
    model: nn.Module,
    loss: Loss,
    store: Store,
    lowering: DeviceLowering | None,
    *,
    is_own: bool,
    in_stages: bool = False,
) -> str:
    """The hash of a lane's results; or the reason why there is none, which workers then compare instead.

    If the model trains `in_stages`, a lane of all of it may be too large for one worker. A module may fail on
    fixed values. A user's own module or loss (`is_own`) may give other bits every time: Lockstep promises
    nothing for it, and does not refuse the worker.
    """
    device = next(model.parameters()).device
    size, half = run.train.batch // run.train.lanes, half_type(run.train.precision)
    way = _choose_way(run, model, loss, lowering)

    def compute() -> list[Tensor]:
        images, failed = torch.zeros(samples, *store.shape, device=device), failed_allocations(device)
        found = run_fixed_lane(way, images, _labels(store, loss, samples, device), memory_format(run))
        check_allocations(device, failed)  # a kernel that is chosen here stays chosen for all steps
        return found

    try:
        samples = size
        if device.type == "cpu" and not lowering:
            samples = fixed_samples(model, torch.zeros(1, *store.shape), size, half)
        if lowering and device.type == "cuda":
            from lockstep.kernels.triton.compile_ahead import compile_ahead

            compile_ahead(compute)
        found = lane_hash(compute())
        return found if not is_own or lane_hash(compute()) == found else "varies"
    except Exception as error:
        if in_stages and not lowering and is_out_of_memory(error):
            return "too large for one worker"
        if lowering or is_out_of_memory(error):
            raise  # it would fail in training, too
        return f"fails: {type(error).__name__}"
    finally:
        way.release()


def _labels(store: Store, loss: Loss, count: int, device: torch.device) -> Any:
    """Fixed class numbers; for a loss over targets of any shape, those of the first samples."""
    if isinstance(loss, WholeLoss):
        return place(store.train.read(torch.arange(count))[1], device)
    return fixed_labels(count, len(store.classes), device)


def _choose_way(run: Run, model: nn.Module, loss: Loss, lowering: DeviceLowering | None) -> LaneByLane:
    """Run a lane as training does, but without torch's compiler, which would take minutes for one lane."""
    if lowering:
        from lockstep.lower.device_lanes import DeviceLanes

        return DeviceLanes(model, lowering.uncompiled(), run.seed)
    return LaneByLane(model, loss, run.seed, half_type(run.train.precision))
