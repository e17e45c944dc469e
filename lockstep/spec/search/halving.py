"""Successive halving: after how many epochs runs are compared, and which of them go on."""

from __future__ import annotations

import math
from collections.abc import Mapping

from lockstep.errors import SpecError


def rung_epochs(epochs: int, rungs: int, keep: float) -> list[int]:
    """After how many epochs a run ends each rung; the last rung is the whole run."""
    found = [max(round(epochs * keep ** (rungs - 1 - rung)), 1) for rung in range(rungs)]
    if found != sorted(set(found)):
        raise SpecError(
            f"train.epochs={epochs} is too short for --rungs {rungs} --keep {keep:g}: they would end after "
            f"{', '.join(map(str, found))} epochs; use more epochs or fewer rungs"
        )
    return found


def keep_best(scores: Mapping[str, float | None], keep: float, losses: Mapping[str, float]) -> list[str]:
    """The names with the highest scores, in the order given: a share, and at least one; never one without.

    Of equal scores the lower loss decides, then the order.
    """
    scored = {name: score for name, score in scores.items() if score is not None and math.isfinite(score)}
    number = max(math.ceil(keep * len(scores)), 1)
    best = sorted(scored, key=lambda name: (-scored[name], losses.get(name, math.inf)))[:number]
    return [name for name in scores if name in best]
