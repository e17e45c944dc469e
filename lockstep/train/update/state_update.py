"""The update of a state: every group of its parameters by the group's optimizer.

A gradient's path ends here: backward → lane tree → optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from lockstep.runs.train_state import TrainState
from lockstep.train import optimizer as rules


def update_state(state: TrainState, step: int, rates: Sequence[float], grads: Mapping[str, Tensor]) -> None:
    """Change weights and memory, each group at its own rate; `step` counts from 0; overwrites `grads`."""
    trained = state.trained()
    for group, rate in zip(state.groups, rates, strict=True):
        params, given = ([table[name] for name in group.names] for table in (trained, grads))
        memory = state.memory_of(group)
        rules.update_params(group.optimizer, rate, step, params, given, memory, group.decayed)
