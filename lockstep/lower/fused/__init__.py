"""Kernel set `fused`: our own kernels, all lanes in one launch, for chains and residual networks."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from lockstep.errors import ModelError
from lockstep.kernels.numerics import half_type
from lockstep.kernels.triton.conv.tile_table import find_table, moves_boxes
from lockstep.lower.fused.chain_program import find_chain
from lockstep.lower.fused.residual_program import find_residual
from lockstep.lower.program import DeviceLowering
from lockstep.spec import Run


def find_lowering(
    run: Run, model: nn.Module, shape: tuple[int, int, int], device: torch.device, trains: bool
) -> DeviceLowering:
    """The model as a program of fused layers; a ModelError says why it cannot be one."""
    # a residual network's kernels are faster than others only with TMA boxes, which are for bf16 and fp16
    residual = run.kernels.set == "fused" or (half_type(run.train.precision) and moves_boxes(device))
    program = find_chain(model, shape) or (find_residual(model, shape) if residual else None)
    if program is None:
        raise ModelError(
            "the model is no chain of convolutions (stride 1, with bias), ReLU, 2x2 max pooling, fully "
            "connected layers, and dropout after the ReLU of one, and no resnet with the small stem"
        )
    if max(layer.num_values for layer in program.layers) * run.train.batch >= 2**31:
        raise ModelError(f"train.batch={run.train.batch} is too large: a layer has more than 2^31 values")
    path = Path(run.kernels.table) if run.kernels.table else None
    return DeviceLowering(program, find_table(device, path), run.train, device)
