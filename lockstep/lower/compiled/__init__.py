"""Kernel set `compiled`: PyTorch's kernels and torch.compile, lanes at once where that changes no bit."""

from __future__ import annotations

import torch
from torch import nn

from lockstep.kernels.triton.conv.tile_table import Table
from lockstep.lower.compiled.compiled_program import find_compiled, prove_lanes
from lockstep.lower.program import DeviceLowering
from lockstep.spec import Run


def find_lowering(
    run: Run, model: nn.Module, shape: tuple[int, int, int], device: torch.device, trains: bool
) -> DeviceLowering:
    """The model for torch.compile; a ModelError says why it cannot be."""
    program = find_compiled(model, shape, run.train, trains)
    if trains:
        program = prove_lanes(program, run.train, device)
    return DeviceLowering(program, Table(), run.train, device)
