"""What each layer sends along each axis, and the time it takes to send and to compute.

On a GPU these are the times that the host takes to launch the work.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

STEP = "step"  # in the place of a layer: all that a worker computes in a step


@dataclass
class Traffic:
    """What a layer has sent along an axis, and the time it took."""

    num_bytes: int = 0
    seconds: float = 0.0


@dataclass
class LayerClock:
    """Adds up over the steps of a run; the first step is left out if others follow, as it warms up."""

    traffic: dict[tuple[str, str], Traffic] = field(default_factory=lambda: defaultdict(Traffic))
    busy_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    steps: int = 0
    _exchanged_s: float = 0.0
    _is_warm: bool = False

    def begin_step(self) -> None:
        """Forget what came before the first step, and after it that step."""
        if not self.steps or not self._is_warm:
            self._is_warm = self._is_warm or self.steps > 0
            self.steps = 0
            self.clear()

    def end_step(self) -> None:
        """Count a step."""
        self.steps += 1

    def clear(self) -> None:
        """Forget everything but the steps."""
        self.traffic.clear()
        self.busy_s.clear()

    def sent(self, axis: str, layer: str, num_bytes: int, start: float) -> None:
        """Count an exchange that began at `start`, the waiting for others included."""
        seconds = time.perf_counter() - start
        seen = self.traffic[axis, layer]
        seen.num_bytes += num_bytes
        seen.seconds += seconds
        self._exchanged_s += seconds

    @contextmanager
    def busy(self, layer: str) -> Iterator[None]:
        """Count what a layer computes inside the block, without exchanges."""
        begun = self._now()
        yield
        self.busy_s[layer] += self._now() - begun

    def watch_backward(self, layer: str, result: Tensor) -> None:
        """Count the backward pass of the operation that gave a result, too."""
        operation, begun = result.grad_fn, 0.0
        if operation is None:
            return

        def begin(grads: Any) -> None:
            nonlocal begun
            begun = self._now()

        def end(grads: Any, given: Any) -> None:
            self.busy_s[layer] += self._now() - begun

        operation.register_prehook(begin)
        operation.register_hook(end)

    def _now(self) -> float:
        """The time, as if exchanges took none."""
        return time.perf_counter() - self._exchanged_s
