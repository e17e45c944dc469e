"""What is told at the start of a run about the kernels that were chosen for it."""

from __future__ import annotations

import torch

from lockstep.kernels.loss import Loss
from lockstep.lower.choose import explain_stock
from lockstep.lower.program import DeviceLowering
from lockstep.spec import Run
from lockstep.spec.rule.optimizer_rule import RULES


def notice_kernels(
    run: Run,
    loss: Loss,
    device: torch.device,
    lowering: DeviceLowering | None,
    has_grid: bool,
    refusal: str,
) -> list[str]:
    """A line for whatever takes long, has no effect, or could be faster; `refusal`: see `explain_stock`."""
    found = []
    if lowering and not lowering.is_fused and device.type == "cuda":
        found.append("torch compiles the model before the first step, which can take minutes")
    if lowering and RULES[run.optimizer.name].whole == "matrix":
        found.append(f"optimizer.name={run.optimizer.name}: several workers step through the host")
    if lowering and run.evaluate.metrics:
        found.append("evaluate.metrics need the outputs of stock kernels: evaluation is slower")
    if has_grid and run.train.channels_last:
        found.append("train.channels_last has no effect with train.bands or train.slices: docs/plans.md")
    if not lowering and (text := explain_stock(run, loss, device, refusal)):
        found.append(text)
    return found
