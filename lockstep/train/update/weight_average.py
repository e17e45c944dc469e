"""The averaged weights of a run with `train.ema`, which every commit moves a little towards the new ones."""

from __future__ import annotations

import torch

from lockstep.runs.train_state import TrainState


@torch.no_grad()
def average_weights(state: TrainState, decay: float) -> None:
    """Change the averages in place: d·a + (1−d)·w, with a smaller d in the first steps; frozen ones stay."""
    decay = averaging(decay, state.updates)
    frozen = {name for name, parameter in state.model.named_parameters() if not parameter.requires_grad}
    averages = {name: average for name, average in state.ema.items() if name not in frozen}
    if not averages:  # a stage of a pipeline may have no tensors
        return
    values = state.floats()
    torch._foreach_mul_(list(averages.values()), decay)
    moves = torch._foreach_mul([values[name] for name in averages], 1.0 - decay)
    torch._foreach_add_(list(averages.values()), moves)


def averaging(decay: float, updates: int) -> float:
    """The share of the averaged weights that an update keeps: less in the first ones."""
    return min(decay, (1 + updates) / (10 + updates)) if decay else 0.0
