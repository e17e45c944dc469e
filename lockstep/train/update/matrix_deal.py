"""Matrices dealt to the workers that have the same ones: each is orthogonalized by one of them, for all.

The bits are those of a worker that computes every matrix, so this may be left out at any time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lockstep.comm.group import Group
from lockstep.runs.train_state import TrainState
from lockstep.spec.param_group import ParamGroup, Shape
from lockstep.train.optimizer import find_moves
from lockstep.train.update.muon import find_move, move_type

Moves = dict[str, Tensor]  # what is subtracted from matrices, times the learning rate, by name


def deal_matrices(shapes: Sequence[Shape], workers: int) -> list[int]:
    """The worker of each matrix: the costliest ones first, each to who has the least to do."""
    loads, found = [0] * workers, [0] * len(shapes)
    for place in sorted(range(len(shapes)), key=lambda place: (-_cost(shapes[place]), place)):
        found[place] = loads.index(min(loads))
        loads[found[place]] += _cost(shapes[place])
    return found


def _cost(shape: Shape) -> int:
    """Multiplications of a step of Newton and Schulz."""
    least, most = sorted((shape[0], math.prod(shape[1:])))
    return least * least * (2 * most + least)


@torch.no_grad()
def exchange_moves(state: TrainState, grads: Mapping[str, Tensor], group: Group) -> Moves:
    """The move of every matrix, by workers that have whole ones; the state stays as it is. A collective."""
    found: Moves = {}
    for matrices in state.groups:
        if matrices.rule.whole != "matrix" or not matrices.names:
            continue
        if group.size > 1:
            found |= _exchange(state, grads, matrices, group)
        else:
            moves = _compute(state, grads, matrices, range(len(matrices.names)))
            found |= zip(matrices.names, moves, strict=True)
    return found


def _exchange(state: TrainState, grads: Mapping[str, Tensor], matrices: ParamGroup, group: Group) -> Moves:
    owners = deal_matrices(matrices.shapes, group.size)
    dealt = [[place for place, owner in enumerate(owners) if owner == rank] for rank in range(group.size)]
    mine, found = _compute(state, grads, matrices, dealt[group.rank]), Moves()
    given = [grads[name] for name in matrices.names]
    is_wide = any(grad.dtype == torch.float64 for grad in given)  # which holds fp32 as it is
    for rank, places in enumerate(dealt):
        sizes = [given[place].numel() for place in places]
        flat = given[0].new_empty(sum(sizes), dtype=torch.float64 if is_wide else torch.float32)
        if rank == group.rank and mine:
            torch.cat([move.flatten().to(flat.dtype) for move in mine], out=flat)
        group.broadcast(flat, rank)
        for place, part in zip(places, torch.split(flat, sizes), strict=True):
            found[matrices.names[place]] = part.to(move_type(given[place]))
    if given[0].is_cuda:
        torch.cuda.current_stream(given[0].device).synchronize()
    group.check()
    return found


def _compute(
    state: TrainState, grads: Mapping[str, Tensor], matrices: ParamGroup, places: Sequence[int]
) -> list[Tensor]:
    """The moves of some matrices, by copies of their memory."""
    if not places:
        return []
    names = [matrices.names[place] for place in places]
    memory = {key: [state.memory[key][name].clone() for name in names] for key in matrices.rule.memory}
    moves = find_moves(matrices.optimizer, 0, [grads[name] for name in names], memory)
    return [find_move(move, matrices.shapes[place]) for move, place in zip(moves, places, strict=True)]
