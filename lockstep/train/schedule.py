"""The learning rate of each step: warm-up, then the named curve."""

from __future__ import annotations

import math

from lockstep.spec import Schedule


def learning_rate(
    schedule: Schedule, base: float, step: int, total_steps: int, steps_per_epoch: int
) -> float:
    """The rate of `step` (from 0): a linear warm-up, then the named curve over the remaining steps."""
    warmup = round(schedule.warmup_epochs * steps_per_epoch)
    if step < warmup:
        return base * (step + 1) / warmup
    done = min((step - warmup) / max(total_steps - warmup, 1), 1.0)  # above 1 if images were removed
    return base * _factor(schedule, done, (step - warmup) / steps_per_epoch)


def _factor(schedule: Schedule, done: float, epochs: float) -> float:
    """The share of the base rate after a share `done` of the steps."""
    options = schedule.options
    match schedule.name:
        case "constant":
            return 1.0
        case "step":
            return float(options["gamma"] ** math.floor(epochs / options["every_epochs"]))
        case "linear":
            return _between(1.0, options["final"], done)
        case "cosine":
            return _between(1.0, options["final"], 0.5 - 0.5 * math.cos(math.pi * done))
        case "onecycle":
            peak = options["peak"]
            if done < peak:
                return _between(options["start"], 1.0, done / peak)
            return _between(1.0, options["final"], (done - peak) / (1.0 - peak))
    raise AssertionError(schedule.name)


def _between(start: float, end: float, share: float) -> float:
    return start + (end - start) * share
