"""The optimizer over all parameters in one launch, and the weights' copy for the kernels.

Every operation rounds once, as `train.optimizer` says; a step that is not finite changes nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lockstep.spec import Optimizer

_BLOCK = 1024
_RULES = {"sgd": 0, "momentum": 1, "nag": 2, "adagrad": 3, "rmsprop": 4, "adadelta": 5, "adam": 6, "adamw": 7}


@triton.jit
def _update(
    p, g, first, second, average, copy, values, cursor, bad, size, trained,
    RULE: tl.constexpr, AVERAGES: tl.constexpr, DECAY: tl.constexpr,
    A: tl.constexpr, B: tl.constexpr, EPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`values` [steps, 6]: see `row`. The first `trained` of `size` values are no statistics."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values += tl.load(cursor) * 6
    inside = (i < size) & (tl.load(bad) == 0)
    lr = tl.load(values)
    weight = tl.load(p + i, mask=inside, other=0.0)
    given = tl.load(g + i, mask=inside, other=0.0)
    grad = given
    if DECAY > 0.0:
        if RULE == 7:
            weight = weight * tl.load(values + 3)
        else:
            grad = grad + weight * DECAY
    if RULE == 0:
        move = grad
    elif RULE <= 2:
        velocity = tl.load(first + i, mask=inside, other=0.0) * A + grad
        tl.store(first + i, velocity, mask=inside)
        move = velocity
        if RULE == 2:
            move = grad + velocity * A
    elif RULE == 3:
        square = tl.load(first + i, mask=inside, other=0.0) + grad * grad
        tl.store(first + i, square, mask=inside)
        move = tl.div_rn(grad, tl.sqrt_rn(square) + EPS)
    elif RULE == 4:
        square = tl.load(first + i, mask=inside, other=0.0) * A + grad * grad * (1.0 - A)
        tl.store(first + i, square, mask=inside)
        move = tl.div_rn(grad, tl.sqrt_rn(square) + EPS)
    elif RULE == 5:
        square = tl.load(first + i, mask=inside, other=0.0) * A + grad * grad * (1.0 - A)
        delta = tl.load(second + i, mask=inside, other=0.0)
        move = tl.div_rn(grad * tl.sqrt_rn(delta + EPS), tl.sqrt_rn(square + EPS))
        tl.store(first + i, square, mask=inside)
        tl.store(second + i, delta * A + move * move * (1.0 - A), mask=inside)
    else:
        square = tl.load(second + i, mask=inside, other=0.0) * B + grad * grad * (1.0 - B)
        mean = tl.load(first + i, mask=inside, other=0.0) * A + grad * (1.0 - A)
        tl.store(second + i, square, mask=inside)
        tl.store(first + i, mean, mask=inside)
        unbiased = tl.div_rn(square, tl.load(values + 2))
        move = tl.div_rn(tl.div_rn(mean, tl.load(values + 1)), tl.sqrt_rn(unbiased) + EPS)
    weight = tl.where(i < trained, weight - move * lr, given)
    tl.store(p + i, weight, mask=inside)
    if AVERAGES:
        old = tl.load(average + i, mask=inside, other=0.0) * tl.load(values + 4)
        tl.store(average + i, old + weight * tl.load(values + 5), mask=inside)
    tl.store(copy + i, weight.to(copy.dtype.element_ty), mask=inside)


@triton.jit
def _advance(cursor, bad, loss, right, results):
    """Write the step's results down and go on to the next, unless it was not finite."""
    step = tl.load(cursor)
    tl.store(results + step * 2, tl.load(loss))
    tl.store(results + step * 2 + 1, tl.load(right))
    if tl.load(bad) == 0:
        tl.store(cursor, step + 1)


def update(
    optimizer: Optimizer, p: Tensor, g: Tensor, memory: list[Tensor], average: Tensor | None, copy: Tensor,
    values: Tensor, cursor: Tensor, bad: Tensor, trained: int,
) -> None:  # fmt: skip
    """Change the flat table `p`, its `memory`, `average` and `copy` by the gradient `g`, unless `bad`.

    `values` has a `row` for each step, read at the `cursor`. What lies behind the first `trained` values are
    statistics, and `g` has their new values.
    """
    options = optimizer.options
    first, second = (*memory, None, None)[:2]
    a = options.get("momentum", options.get("alpha", options.get("rho", options.get("beta1", 0.0))))
    _update[(triton.cdiv(len(p), _BLOCK),)](
        p, g, first, second, average, copy, values, cursor, bad, len(p), trained,
        RULE=_RULES[optimizer.name], AVERAGES=average is not None, DECAY=optimizer.weight_decay,
        A=a, B=options.get("beta2", 0.0), EPS=options.get("eps", 0.0), BLOCK=_BLOCK, enable_fp_fusion=False,
    )  # fmt: skip


def row(optimizer: Optimizer, lr: float, ema: float, step: int) -> list[float]:
    """What the update reads of a step: the rate, what corrects averages, what decays weights and averages."""
    options = optimizer.options
    beta1, beta2 = options.get("beta1", 0.0), options.get("beta2", 0.0)
    decay = 1.0 - lr * optimizer.weight_decay
    return [lr, 1.0 - beta1 ** (step + 1), 1.0 - beta2 ** (step + 1), decay, ema, 1.0 - ema]


def advance(cursor: Tensor, bad: Tensor, loss: Tensor, right: Tensor, results: Tensor) -> None:
    """End a step on the device."""
    _advance[(1,)](cursor, bad, loss, right, results)
