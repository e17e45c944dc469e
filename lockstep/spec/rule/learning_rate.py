"""Defines the learning-rate schedules: the keys and the curve of each; a new one is an entry in CURVES."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

Options = Mapping[str, float]


@dataclass(frozen=True)
class Curve:
    """One schedule, after the warm-up.

    `factor` gives the fraction of the base rate from the schedule's keys, the fraction of the steps that are
    done, and the epochs since the warm-up.
    """

    factor: Callable[[Options, float, float], float]
    keys: Options = field(default_factory=dict)  # with their defaults


def find_rate(
    name: str, options: Options, base: float, warmup_steps: int, step: int, total_steps: int, epochs: float
) -> float:
    """The rate of `step` (from 0): a linear warm-up, then the named curve over the remaining steps.

    `epochs` have passed since the warm-up.
    """
    if step < warmup_steps:
        return base * (step + 1) / warmup_steps
    # above 1 if images were removed from the data since the run began
    done = min((step - warmup_steps) / max(total_steps - warmup_steps, 1), 1.0)
    return base * CURVES[name].factor(options, done, epochs)


def _step(options: Options, done: float, epochs: float) -> float:
    return float(options["gamma"] ** math.floor(epochs / options["every_epochs"]))


def _linear(options: Options, done: float, epochs: float) -> float:
    return _between(1.0, options["final"], done)


def _cosine(options: Options, done: float, epochs: float) -> float:
    return _between(1.0, options["final"], 0.5 - 0.5 * math.cos(math.pi * done))


def _onecycle(options: Options, done: float, epochs: float) -> float:
    peak = options["peak"]
    if done < peak:
        return _between(options["start"], 1.0, done / peak)
    return _between(1.0, options["final"], (done - peak) / (1.0 - peak))


def _between(start: float, end: float, fraction: float) -> float:
    return start + (end - start) * fraction


CURVES = {
    "constant": Curve(lambda options, done, epochs: 1.0),
    "step": Curve(_step, {"every_epochs": 10.0, "gamma": 0.1}),
    "cosine": Curve(_cosine, {"final": 0.0}),
    "linear": Curve(_linear, {"final": 0.0}),
    "onecycle": Curve(_onecycle, {"peak": 0.3, "start": 0.04, "final": 0.0}),
}
