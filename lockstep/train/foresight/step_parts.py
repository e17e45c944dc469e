"""How long the parts of a worker's steps took, beside what was predicted of them."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping

_KEPT = 1000  # steps, the last ones
_FIRST = 4  # that are not counted, if there are more
Parts = tuple[float, float, float]  # seconds of a step; of them waiting for data, and for the exchange


class StepParts:
    """Notes steps; says the median of each part."""

    def __init__(self) -> None:
        self._steps: deque[Parts] = deque(maxlen=_KEPT)
        self._count = 0

    def add(self, seconds: float, waited_s: float, exchange_s: float) -> None:
        """Note one step."""
        self._count += 1
        if self._count == _FIRST + 1:
            self._steps.clear()
        self._steps.append((seconds, waited_s, exchange_s))

    def compare(self, predicted: Mapping[str, float]) -> dict[str, list[float]]:
        """[predicted, measured] seconds of every part that was predicted."""
        if not self._steps:
            return {}
        step_s, data_s, exchange_s = (statistics.median(part) for part in zip(*self._steps, strict=True))
        measured = {"step_s": step_s, "exchange_s": exchange_s, "data_s": data_s}
        measured["compute_s"] = max(step_s - data_s - exchange_s, 0.0)
        return {key: [value, round(measured[key], 6)] for key, value in predicted.items()}
