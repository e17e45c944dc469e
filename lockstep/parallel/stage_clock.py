"""How a stage spends its time, computing or waiting for its neighbours; what it sends and what it keeps."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from lockstep.measure.peak_memory import peak_bytes
from lockstep.parallel.schedule import Turn

T = TypeVar("T")


class StageClock:
    """Adds up seconds over the steps of a run; the first step is left out, as it warms up."""

    def __init__(self) -> None:
        self._steps, self._busy_s, self._waited_s = 0, 0.0, 0.0
        self._events: list[tuple[str, int, float, float]] = []  # kind, lane, Unix times of beginning and end
        self._timeline = self._events  # of the last step
        self.in_flight = 0  # the most lanes whose activations waited at one time

    @contextmanager
    def busy(self, turn: Turn) -> Iterator[None]:
        """Count the time of a turn, which may begin with a `wait` that does not count."""
        start, waited = time.time(), self._waited_s
        yield
        end = time.time()
        start += self._waited_s - waited
        self._busy_s += end - start
        self._events.append((turn.kind, turn.lane, round(start, 6), round(end, 6)))

    def wait(self, future: Future[T]) -> T:
        """The result of a future; the time until it is there counts as waiting."""
        start = time.perf_counter()
        found = future.result()
        self._waited_s += time.perf_counter() - start
        return found

    def end_step(self) -> None:
        """Count a step."""
        self._timeline, self._events = self._events, []
        self._steps += 1
        if self._steps == 1:
            self._busy_s = self._waited_s = 0.0

    def report(self, stage: int, sent_bytes: int, device: torch.device) -> dict[str, Any]:
        """What `summary.json` has of this stage."""
        steps = max(self._steps - 1, 1)
        return {
            "stage": stage,
            "busy_s": round(self._busy_s / steps, 6),
            "waited_s": round(self._waited_s / steps, 6),
            "bubble": round(self._waited_s / max(self._busy_s + self._waited_s, 1e-9), 4),
            "sent_mb": round(sent_bytes / max(self._steps, 1) / 1e6, 3),
            "lanes_in_flight": self.in_flight,
            "peak_mb": round(peak_bytes(device) / 1e6, 1),
            "timeline": self._timeline,
        }
