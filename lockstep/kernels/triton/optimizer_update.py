"""The optimizer on a GPU: the rules of `spec/rule/optimizer_rule.py` compiled, all parameters in one launch.

Every operation rounds once, so the bits are those of `train.optimizer`. A step that is not finite changes
nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from lockstep.spec import Optimizer
from lockstep.spec.rule.optimizer_rule import RULES

_BLOCK = 1024
# Elements: tensors of a flat table begin at its multiples, so no load of 16 bytes reaches into the next one.
ALIGN = 64
# Triton's interpreter calls plain Python functions
_compile = (lambda direction: direction) if triton.knobs.runtime.interpret else triton.jit
_DIRECTIONS = {name: _compile(rule.direction) for name, rule in RULES.items()}


@triton.jit
def _divide(x, y):
    return tl.div_rn(x, y)


@triton.jit
def _sqrt(x):
    return tl.sqrt_rn(x)


@triton.jit
def _update(
    p, g, first, second, average, copy, values, cursor, skipped, bad, decayed, members, owners, ratios, size,
    trained,
    DIRECTION: tl.constexpr, DIVIDE: tl.constexpr, SQRT: tl.constexpr,
    MEMORY: tl.constexpr, AVERAGES: tl.constexpr, DECAY: tl.constexpr,
    DECAYS_WEIGHTS: tl.constexpr, CHOOSES: tl.constexpr, SOME: tl.constexpr, TRUSTS: tl.constexpr,
    ALIGN: tl.constexpr,
    A: tl.constexpr, B: tl.constexpr, EPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`values` [steps, 6]: see `step_values`; the values of p after the first `trained` are statistics."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values += tl.load(cursor) * 6
    updates = values
    if skipped is not None:
        updates -= tl.load(skipped) * 6
    inside = (i < size) & (tl.load(bad) == 0)
    if SOME:
        inside &= tl.load(members + i // ALIGN, mask=inside, other=0) != 0
    lr = tl.load(values)
    weight = tl.load(p + i, mask=inside, other=0.0)
    given = tl.load(g + i, mask=inside, other=0.0)
    grad = given
    if DECAY > 0.0:
        if DECAYS_WEIGHTS:
            shrunk, added = weight * tl.load(values + 3), grad
        else:
            shrunk, added = weight, grad + weight * DECAY
        if CHOOSES:
            is_decayed = tl.load(decayed + i // ALIGN, mask=inside, other=0) != 0
            shrunk, added = tl.where(is_decayed, shrunk, weight), tl.where(is_decayed, added, grad)
        weight, grad = shrunk, added
    if TRUSTS:
        owner = tl.load(owners + i // ALIGN, mask=inside, other=0)
        grad = grad * tl.load(ratios + owner, mask=inside, other=0.0)
    one, two = grad, grad  # placeholders for a rule without memory
    if MEMORY > 0:
        one = tl.load(first + i, mask=inside, other=0.0)
    if MEMORY > 1:
        two = tl.load(second + i, mask=inside, other=0.0)
    move, one, two = DIRECTION(
        grad, one, two, A, B, EPS, tl.load(updates + 1), tl.load(updates + 2), DIVIDE, SQRT
    )
    if MEMORY > 0:
        tl.store(first + i, one, mask=inside)
    if MEMORY > 1:
        tl.store(second + i, two, mask=inside)
    weight = tl.where(i < trained, weight - move * lr, given)
    tl.store(p + i, weight, mask=inside)
    if AVERAGES:
        old = tl.load(average + i, mask=inside, other=0.0) * tl.load(updates + 4)
        tl.store(average + i, old + weight * tl.load(updates + 5), mask=inside)
    tl.store(copy + i, weight.to(copy.dtype.element_ty), mask=inside)


@triton.jit
def _move(
    p, g, first, second, values, cursor, skipped, bad, decayed, members, trained,
    DIRECTION: tl.constexpr, DIVIDE: tl.constexpr, SQRT: tl.constexpr, DECAY: tl.constexpr,
    MEMORY: tl.constexpr, SOME: tl.constexpr,
    ALIGN: tl.constexpr, A: tl.constexpr, B: tl.constexpr, EPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Replace gradients by what a rule subtracts, with its weight decay if that is added to it."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    updates = values + tl.load(cursor) * 6
    if skipped is not None:
        updates -= tl.load(skipped) * 6
    inside = (i < trained) & (tl.load(bad) == 0)
    if SOME:
        inside &= tl.load(members + i // ALIGN, mask=inside, other=0) != 0
    grad = tl.load(g + i, mask=inside, other=0.0)
    one = tl.load(first + i, mask=inside, other=0.0)
    two = grad  # a placeholder for a rule with one memory
    if MEMORY > 1:
        two = tl.load(second + i, mask=inside, other=0.0)
    move, one, two = DIRECTION(
        grad, one, two, A, B, EPS, tl.load(updates + 1), tl.load(updates + 2), DIVIDE, SQRT
    )
    tl.store(first + i, one, mask=inside)
    if MEMORY > 1:
        tl.store(second + i, two, mask=inside)
    if DECAY > 0.0:
        added = move + tl.load(p + i, mask=inside, other=0.0) * DECAY
        move = tl.where(tl.load(decayed + i // ALIGN, mask=inside, other=0) != 0, added, move)
    tl.store(g + i, move, mask=inside)


@triton.jit
def _advance(cursor, bad, loss, right, results, WIDTH: tl.constexpr):
    """Store the step's loss and right answers; advance the cursor if the step was finite."""
    step = tl.load(cursor)
    tl.store(results + step * WIDTH, tl.load(loss))
    tl.store(results + step * WIDTH + 1, tl.load(right))
    if tl.load(bad) == 0:
        tl.store(cursor, step + 1)


@dataclass(frozen=True)
class Trust:
    """The trust ratios of the parameters of a flat table."""

    owners: Tensor  # for every `ALIGN` values of the table, the place of their parameter's ratio, int32
    ratios: Tensor  # the first is 1, of what has none
    find: Callable[[Tensor, Tensor], None]  # from weights, and gradients or updates, to the ratios


@dataclass(frozen=True)
class FlatTables:
    """The tables of a network that a step changes, and where the steps are.

    The first `trained` values of `p` are parameters, with their gradients in `g`; then come statistics, whose
    new values are in `g`. The `cursor` is the number of the step; `bad` says that it is not finite; `skipped`
    are steps before it that updated nothing, by which bias corrections and averages are behind.
    """

    p: Tensor
    g: Tensor
    average: Tensor | None
    copy: Tensor
    cursor: Tensor
    bad: Tensor
    trained: int
    skipped: Tensor | None = None


@dataclass(frozen=True)
class FlatGroup:
    """What one optimizer needs for its parameters in the flat tables.

    `decayed` and `members` have a number for every `ALIGN` values of a table: 0 leaves them out of weight
    decay, or of the group; None: all have it, or are in it. `values` has a row of `step_values` a step.
    """

    optimizer: Optimizer
    memory: list[Tensor]
    values: Tensor
    decayed: Tensor | None = None
    members: Tensor | None = None
    trust: Trust | None = None  # of a rule that looks at norms of whole parameters
    orthogonalize: Callable[[Tensor], None] | None = None  # of a rule of matrices: changes their moves


def update_flat(tables: FlatTables, group: FlatGroup) -> None:
    """Update the parameters of a group, their memory, averages and copies, unless the step is bad.

    A rule that looks at whole updates overwrites the gradients by them.
    """
    optimizer, rule, memory = group.optimizer, RULES[group.optimizer.name], group.memory
    name, decay, trained = optimizer.name, optimizer.weight_decay, tables.trained
    a, b, eps = rule.numbers(optimizer.options)
    numbers: dict[str, Any] = {"A": a, "B": b, "EPS": eps, "BLOCK": _BLOCK, "ALIGN": ALIGN}
    numbers |= {
        "DIVIDE": _divide,
        "SQRT": _sqrt,
        "enable_fp_fusion": False,
        "SOME": group.members is not None,
    }
    if rule.whole in ("update", "matrix"):
        first, second = (*memory, None)[:2]
        _move[(triton.cdiv(trained, _BLOCK),)](
            tables.p, tables.g, first, second, group.values, tables.cursor, tables.skipped, tables.bad,
            group.decayed, group.members, trained, DIRECTION=_DIRECTIONS[name], MEMORY=len(memory),
            DECAY=0.0 if rule.decays_weights else decay, **numbers,
        )  # fmt: skip
        # what is left is to subtract
        name, memory, decay = "sgd", [], decay if rule.decays_weights else 0.0
    if group.orthogonalize:
        group.orthogonalize(tables.g)
    if group.trust:
        group.trust.find(tables.p, tables.g)
    first, second = (*memory, None, None)[:2]
    _update[(triton.cdiv(len(tables.p), _BLOCK),)](
        tables.p, tables.g, first, second, tables.average, tables.copy, group.values, tables.cursor,
        tables.skipped, tables.bad, group.decayed, group.members, group.trust and group.trust.owners,
        group.trust and group.trust.ratios, len(tables.p), trained,
        DIRECTION=_DIRECTIONS[name], MEMORY=len(memory), AVERAGES=tables.average is not None,
        CHOOSES=group.decayed is not None, TRUSTS=group.trust is not None, DECAY=decay,
        DECAYS_WEIGHTS=rule.decays_weights, **numbers,
    )  # fmt: skip


def step_values(optimizer: Optimizer, lr: float, ema: float, step: int) -> list[float]:
    """A step's learning rate, two bias corrections, factor of weight decay and two factors of averaging."""
    corrections = RULES[optimizer.name].corrections(optimizer.options, step)
    return [lr, *corrections, 1.0 - lr * optimizer.weight_decay, ema, 1.0 - ema]


def advance_cursor(cursor: Tensor, bad: Tensor, loss: Tensor, right: Tensor, results: Tensor) -> None:
    """Store the results of a step on the device, and go to the next step if it was finite."""
    _advance[(1,)](cursor, bad, loss, right, results, WIDTH=results.shape[1])
