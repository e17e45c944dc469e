"""The optimizer on the host: a rule of `spec/rule/optimizer_rule.py` over lists of tensors.

A gradient's path ends here: backward → lane tree → optimizer. Every operation rounds once, as IEEE 754 says.
PyTorch's fused optimizers do not, and their result depends on how tensors are cut into slices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lockstep.kernels.one_pass_update import update_in_one_pass
from lockstep.runs.train_state import Memory
from lockstep.spec import Optimizer
from lockstep.spec.rule.optimizer_rule import RULES
from lockstep.train.update.trust_ratio import trust_ratios

PORTION = 1 << 16  # elements that a thread takes through all passes of a rule: a quarter of a MB each


@torch.no_grad()
def update_params(
    optimizer: Optimizer, lr: float, step: int, params: list[Tensor], grads: list[Tensor], memory: Memory,
    decayed: list[bool] | None = None,
) -> None:  # fmt: skip
    """Change `params` and `memory` in place; `step` counts from 0. The gradients are overwritten.

    `decayed` says which of `params` have weight decay, and a trust ratio if the rule has any; None: all.
    """
    if not params:  # a stage of a pipeline may have none that are trained
        return
    whole, chosen = RULES[optimizer.name].whole, decayed or [True] * len(params)
    if not whole and params[0].is_cpu:
        rows = [params, grads, *memory.values()]
        left = update_in_one_pass(optimizer, lr, step, rows, chosen)
        rows = [[row[place] for place in left] for row in rows]
        for pieces in _portions(rows, [chosen[place] for place in left]) if left else ():
            (some, their_grads, *kept), flags = pieces
            _update(optimizer, lr, step, some, their_grads, dict(zip(memory, kept, strict=True)), flags)
        return
    _update(optimizer, lr, step, params, grads, memory, chosen)


def _update(
    optimizer: Optimizer, lr: float, step: int, params: list[Tensor], grads: list[Tensor], memory: Memory,
    chosen: list[bool],
) -> None:  # fmt: skip
    whole = RULES[optimizer.name].whole
    if whole == "gradient":
        _decay_and_trust(optimizer, params, grads, chosen)
    elif whole != "update":
        _decay(optimizer, lr, params, grads, chosen)
    moves = find_moves(optimizer, step, grads, memory)
    if whole == "update":
        _decay_and_trust(optimizer, params, moves, chosen)
    torch._foreach_sub_(params, torch._foreach_mul(moves, lr))


def _portions(
    rows: Sequence[list[Tensor]], decayed: list[bool]
) -> Iterator[tuple[list[list[Tensor]], list[bool]]]:
    """The same pieces of each row of tensors, so many at a time as fit a cache: a rule makes several passes.

    A rule that takes element by element gives the same bits for any pieces.
    """
    most = PORTION * torch.get_num_threads()
    pieces: list[list[Tensor]] = [[] for _ in rows]
    flags, filled = list[bool](), 0
    for place, is_decayed in enumerate(decayed):
        tensors = [row[place] for row in rows]
        size = tensors[0].numel()
        if size <= most or not all(tensor.is_contiguous() for tensor in tensors):
            cuts = [tensors]
        else:
            flat = [torch.split(tensor.view(-1), most) for tensor in tensors]
            cuts = [list(cut) for cut in zip(*flat, strict=True)]
        for cut in cuts:
            if filled and filled + cut[0].numel() > most:
                yield pieces, flags
                pieces, flags, filled = [[] for _ in rows], [], 0
            for row, piece in zip(pieces, cut, strict=True):
                row.append(piece)
            flags.append(is_decayed)
            filled += cut[0].numel()
    yield pieces, flags


def find_moves(optimizer: Optimizer, step: int, grads: list[Tensor], memory: Memory) -> list[Tensor]:
    """What is subtracted from the weights, times the learning rate; changes `memory`."""
    rule = RULES[optimizer.name]
    kept = [_Each(tensors) for tensors in memory.values()]
    first, second = (*kept, None, None)[:2]
    numbers, corrections = rule.numbers(optimizer.options), rule.corrections(optimizer.options, step)
    move, *changed = rule.direction(_Each(grads), first, second, *numbers, *corrections, _divide, _sqrt)
    for tensors, new in zip(memory.values(), changed, strict=False):
        torch._foreach_copy_(tensors, new.tensors)
    found: list[Tensor] = move.tensors
    return found


def _decay_and_trust(
    optimizer: Optimizer, params: list[Tensor], moves: list[Tensor], decayed: list[bool]
) -> None:
    """Add weight decay to gradients or updates, and scale them by their trust ratios, in place."""
    places = [place for place, is_decayed in enumerate(decayed) if is_decayed]
    if not places:
        return
    weights, chosen = [params[place] for place in places], [moves[place] for place in places]
    before = trust_ratios(optimizer, weights, chosen) if RULES[optimizer.name].whole == "gradient" else None
    if optimizer.weight_decay:
        torch._foreach_add_(chosen, torch._foreach_mul(weights, optimizer.weight_decay))
    ratios = trust_ratios(optimizer, weights, chosen) if before is None else before
    torch._foreach_mul_(chosen, list(ratios.unbind()))


def _decay(
    optimizer: Optimizer, lr: float, params: list[Tensor], grads: list[Tensor], decayed: list[bool]
) -> None:
    """Shrink the weights, or add their decay to the gradients."""
    weights = [p for p, is_decayed in zip(params, decayed, strict=True) if is_decayed]
    if not optimizer.weight_decay or not weights:
        return
    if RULES[optimizer.name].decays_weights:
        torch._foreach_mul_(weights, 1.0 - lr * optimizer.weight_decay)
    else:
        chosen = [grad for grad, is_decayed in zip(grads, decayed, strict=True) if is_decayed]
        torch._foreach_add_(chosen, torch._foreach_mul(weights, optimizer.weight_decay))


class _Each:
    """A list of tensors, one per parameter, that takes part in arithmetic like one value."""

    def __init__(self, tensors: list[Tensor] | tuple[Tensor, ...]) -> None:
        self.tensors = list(tensors)

    def __add__(self, other: _Each | float) -> _Each:
        return _Each(torch._foreach_add(self.tensors, _plain(other)))

    def __mul__(self, other: _Each | float) -> _Each:
        return _Each(torch._foreach_mul(self.tensors, _plain(other)))


def _plain(value: _Each | float) -> list[Tensor] | float:
    return value.tensors if isinstance(value, _Each) else value


def _divide(values: _Each, by: _Each | float) -> _Each:
    """Quotients rounded once; by a tensor, since a GPU would multiply by the reciprocal of a plain number."""
    like = values.tensors[0]
    if not isinstance(by, _Each):
        by = _Each([torch.full((), by, dtype=like.dtype, device=like.device)] * len(values.tensors))
    return _Each(torch._foreach_div(values.tensors, by.tensors))


def _sqrt(values: _Each) -> _Each:
    """Square roots rounded once; by fp64 on a CPU, where torch's fp32 roots are sometimes one bit off."""
    return _Each([v.double().sqrt().to(v.dtype) if v.is_cpu else v.sqrt() for v in values.tensors])
