"""The update of a state: every group of its parameters by the group's optimizer.

A gradient's path ends here: backward → lane tree → optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from lockstep.comm.group import Group
from lockstep.runs.train_state import TrainState
from lockstep.spec import Run
from lockstep.train import optimizer as rules
from lockstep.train.update.matrix_deal import Moves, exchange_moves
from lockstep.train.update.muon import update_matrices


def find_rates(run: Run, state: TrainState, steps_per_epoch: int, total_steps: int) -> list[float]:
    """The rate of the step or round that comes next, and that of each group of parameters."""
    # not `state.step`: epochs may have been longer before the data was changed
    done = state.epoch * steps_per_epoch + state.step_in_epoch
    return [
        run.schedule.rate(run.rate_factor * base, done, total_steps, steps_per_epoch)
        for base in (run.optimizer.lr, *(group.optimizer.lr for group in state.groups))
    ]


def update_state(
    state: TrainState,
    step: int,
    rates: Sequence[float],
    grads: Mapping[str, Tensor],
    moves: Moves | None = None,
) -> None:
    """Change weights and memory, each group at its own rate; `step` counts from 0; overwrites `grads`.

    `moves` are those of matrices; they are computed here, before anything changes, if they are not known.
    """
    moves = exchange_moves(state, grads, Group()) if moves is None else moves
    trained = state.trained()
    for group, rate in zip(state.groups, rates, strict=True):
        params, given = ([table[name] for name in group.names] for table in (trained, grads))
        memory = state.memory_of(group)
        if group.rule.whole == "matrix":
            update_matrices(group, rate, params, given, memory, moves)
            continue
        rules.update_params(group.optimizer, rate, step, params, given, memory, group.decayed)
