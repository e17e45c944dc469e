"""Defines the optimizers: the keys, the memory and the arithmetic of each; a new one is an entry in RULES.

The arithmetic is written once, in plain Python. The host runs it on lists of tensors
(`train/optimizer.py`), and a GPU compiles it (`kernels/triton/optimizer_update.py`). It may add,
multiply, and call `divide` and `sqrt`, each of which rounds once. So an element's new value depends only on
that element, not on the slice, the vector width or the device that it was computed with.

Some rules look at whole parameters besides (`whole`), on host and device by `train/update/`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

# (grad, first, second, a, b, eps, correct_a, correct_b, divide, sqrt) → (direction, new first, new second).
# The learning rate times the direction is subtracted from the weights. `first` and `second` are the memory.
# `a` and `b` are the rule's keys other than eps, in their order; `correct_a` is 1 − a^n after n steps.
Direction = Callable[..., tuple[Any, Any, Any]]


@dataclass(frozen=True)
class Rule:
    """One optimizer."""

    direction: Direction
    keys: Mapping[str, Any]  # with their defaults: numbers, and text for `rest`
    memory: tuple[str, ...] = ()  # names of the tensors that it keeps from step to step, two at most
    decays_weights: bool = False  # weight decay shrinks the weights directly, not through the gradient
    # What it looks at as a whole. A "gradient" before `direction`, or an "update" after it, is scaled by the
    # norm of its weight over its own; those of norms and biases are not, and have no weight decay. An update
    # as a "matrix" is orthogonalized; what is no matrix has the rule that `rest` names.
    whole: str = ""
    takes: tuple[str, ...] = ()  # the keys that are `a` and `b`; none: all but eps

    def numbers(self, options: Mapping[str, Any]) -> tuple[float, float, float]:
        """`a`, `b` and `eps` of a run; 0 if the rule does not have them."""
        names = self.takes or [key for key in self.keys if key != "eps"]
        a, b, *_ = (*(options[key] for key in names), 0.0, 0.0)
        return a, b, options.get("eps", 0.0)

    def corrections(self, options: Mapping[str, Any], step: int) -> tuple[float, float]:
        """`correct_a` and `correct_b` of a step, which counts from 0."""
        a, b, _ = self.numbers(options)
        return 1.0 - a ** (step + 1), 1.0 - b ** (step + 1)


RESTS = ("adamw", "momentum")  # rules that parameters without a matrix may have beside `muon`


def is_norm_or_bias(name: str, num_dims: int) -> bool:
    """Whether a parameter is left out by `optimizer.decay_norms=false` and by trust ratios, as in timm."""
    return num_dims <= 1 or name.endswith(".bias")


def _sgd(grad, first, second, a, b, eps, correct_a, correct_b, divide, sqrt):
    return grad, first, second


def _momentum(grad, velocity, second, a, b, eps, correct_a, correct_b, divide, sqrt):
    velocity = velocity * a + grad
    return velocity, velocity, second


def _nag(grad, velocity, second, a, b, eps, correct_a, correct_b, divide, sqrt):
    velocity = velocity * a + grad
    return grad + velocity * a, velocity, second


def _adagrad(grad, square, second, a, b, eps, correct_a, correct_b, divide, sqrt):
    square = square + grad * grad
    return divide(grad, sqrt(square) + eps), square, second


def _rmsprop(grad, square, second, a, b, eps, correct_a, correct_b, divide, sqrt):
    square = square * a + grad * grad * (1.0 - a)
    return divide(grad, sqrt(square) + eps), square, second


def _adadelta(grad, square, delta, a, b, eps, correct_a, correct_b, divide, sqrt):
    square = square * a + grad * grad * (1.0 - a)
    move = divide(grad * sqrt(delta + eps), sqrt(square + eps))
    return move, square, delta * a + move * move * (1.0 - a)


def _adam(grad, mean, square, a, b, eps, correct_a, correct_b, divide, sqrt):
    square = square * b + grad * grad * (1.0 - b)
    mean = mean * a + grad * (1.0 - a)
    return divide(divide(mean, correct_a), sqrt(divide(square, correct_b)) + eps), mean, square


def _muon(grad, velocity, second, a, b, eps, correct_a, correct_b, divide, sqrt):
    velocity = velocity * a + grad * (1.0 - a)
    return grad * (1.0 - a) + velocity * a, velocity, second


_ADAM = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
RULES: dict[str, Rule] = {
    "sgd": Rule(_sgd, {}),
    "momentum": Rule(_momentum, {"momentum": 0.9}, ("velocity",)),
    "nag": Rule(_nag, {"momentum": 0.9}, ("velocity",)),
    "adagrad": Rule(_adagrad, {"eps": 1e-10}, ("square",)),
    "adadelta": Rule(_adadelta, {"rho": 0.9, "eps": 1e-6}, ("square", "delta")),
    "rmsprop": Rule(_rmsprop, {"alpha": 0.99, "eps": 1e-8}, ("square",)),
    "adam": Rule(_adam, _ADAM, ("mean", "square")),
    "adamw": Rule(_adam, _ADAM, ("mean", "square"), decays_weights=True),
    "lars": Rule(
        _momentum,
        {"momentum": 0.9, "trust": 1e-3, "eps": 1e-8},
        ("velocity",),
        whole="gradient",
        takes=("momentum",),
    ),
    "lamb": Rule(_adam, {**_ADAM, "eps": 1e-6}, ("mean", "square"), whole="update"),
    "muon": Rule(
        _muon,
        {"momentum": 0.95, "rest": "adamw", "rest_lr": 1e-3, **_ADAM},
        ("velocity",),
        decays_weights=True,
        whole="matrix",
        takes=("momentum",),
    ),
}
