"""The averaged weights of a run with `train.ema`, which every commit moves a little towards the new ones."""

from __future__ import annotations

import torch

from lockstep.runs.train_state import TrainState


@torch.no_grad()
def average_weights(state: TrainState, decay: float) -> None:
    """Change the averages in place: d·a + (1−d)·w, with a smaller d in the first steps."""
    decay = averaging(decay, state.updates)
    averages = list(state.ema.values())
    if not averages:  # a stage of a pipeline may have no tensors
        return
    torch._foreach_mul_(averages, decay)
    torch._foreach_add_(averages, torch._foreach_mul(list(state.floats().values()), 1.0 - decay))


def averaging(decay: float, updates: int) -> float:
    """The share of the averaged weights that an update keeps: less in the first ones."""
    return min(decay, (1 + updates) / (10 + updates)) if decay else 0.0
