"""The update of a state: every group of its parameters by the group's optimizer.

A gradient's path ends here: backward → lane tree → optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from lockstep.runs.train_state import TrainState
from lockstep.train import optimizer as rules
from lockstep.train.update.muon import update_matrices


def update_state(
    state: TrainState,
    step: int,
    rates: Sequence[float],
    grads: Mapping[str, Tensor],
    moves: Mapping[str, Tensor] | None = None,
) -> None:
    """Change weights and memory, each group at its own rate; `step` counts from 0; overwrites `grads`.

    `moves` are those of matrices that are known already.
    """
    trained = state.trained()
    for group, rate in zip(state.groups, rates, strict=True):
        params, given = ([table[name] for name in group.names] for table in (trained, grads))
        memory = state.memory_of(group)
        if group.rule.whole == "matrix":
            update_matrices(group, rate, params, given, memory, moves or {})
            continue
        rules.update_params(group.optimizer, rate, step, params, given, memory, group.decayed)
