"""How a stage spends its time, computing or waiting for its neighbours; what it sends and what it keeps."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class StageClock:
    """Adds up seconds over the steps of a run; the first step is left out, as it warms up."""

    def __init__(self) -> None:
        self._steps, self._busy_s, self._waited_s, self._now = 0, 0.0, 0.0, 0.0
        self.in_flight = 0  # the most lanes whose activations waited at one time

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Count the time of this block, without what `wait` counts in it."""
        start, waited = time.perf_counter(), self._waited_s
        try:
            yield
        finally:
            self._busy_s += time.perf_counter() - start - (self._waited_s - waited)

    def wait(self, future: Future[T]) -> T:
        """The result of a future; the time until it is there counts as waiting."""
        start = time.perf_counter()
        found = future.result()
        self._waited_s += time.perf_counter() - start
        return found

    def end_step(self) -> None:
        """Count a step."""
        self._steps += 1
        if self._steps == 1:
            self._busy_s = self._waited_s = 0.0

    def report(self, stage: int, sent_bytes: int, device: torch.device) -> dict[str, Any]:
        """What `summary.json` has of this stage."""
        steps = max(self._steps - 1, 1)
        on_gpu = device.type == "cuda"
        peak = torch.cuda.max_memory_allocated(device) if on_gpu else _peak_bytes()
        return {
            "stage": stage,
            "busy_s": round(self._busy_s / steps, 6),
            "waited_s": round(self._waited_s / steps, 6),
            "bubble": round(self._waited_s / max(self._busy_s + self._waited_s, 1e-9), 4),
            "sent_mb": round(sent_bytes / max(self._steps, 1) / 1e6, 3),
            "lanes_in_flight": self.in_flight,
            "peak_mb": round(peak / 1e6, 1),
        }


def _peak_bytes() -> int:
    """The most memory that this process has had, on Linux."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
