"""How long the parts of a worker's steps took, beside what was predicted of them."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.train.result import StepResult

_KEPT = 1000  # steps, the last ones
_FIRST = 4  # that are not counted, if there are more


class StepParts:
    """Notes steps; says the median of each part."""

    def __init__(self) -> None:
        self._steps: deque[dict[str, float]] = deque(maxlen=_KEPT)
        self._count = 0

    def add(self, seconds: float, result: StepResult) -> None:
        """Note one step that took so long in all; of a round, the mean of its steps."""
        self._count += 1
        if self._count == _FIRST + 1:
            self._steps.clear()
        data_s, exchange_s, compute_s = result.waited_s, result.exchange_s, result.compute_s
        found = {"step_s": seconds, "data_s": data_s, "exchange_s": exchange_s}
        if compute_s:
            found |= {"compute_s": compute_s, "hidden_s": result.hidden_s}
            found["host_s"] = max(seconds - data_s - exchange_s - compute_s, 0.0)
        else:  # whole steps on the device
            found["compute_s"] = max(seconds - data_s - exchange_s, 0.0)
        self._steps.append({key: value / result.steps for key, value in found.items()})

    def compare(self, predicted: Mapping[str, Any]) -> dict[str, list[float]]:
        """[predicted, measured] seconds of every part that was predicted and can be measured."""
        if not self._steps:
            return {}
        known = [key for key in predicted if all(key in step for step in self._steps)]
        measured = {key: statistics.median(step[key] for step in self._steps) for key in known}
        return {key: [round(predicted[key], 6), round(measured[key], 6)] for key in known}
