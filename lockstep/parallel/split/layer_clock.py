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

_MOST = 1500  # events of a step that are kept: those of the first lanes
BUSY = "busy"
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
    # of the last step: layer, what it did (an axis, or `BUSY`), when, and for how long
    events: list[tuple[str, str, float, float]] = field(default_factory=list)
    _exchanged_s: float = 0.0
    _is_warm: bool = False

    def begin_step(self) -> None:
        """Forget what came before the first step, and after it that step."""
        self.events.clear()
        if not self.steps or not self._is_warm:
            self._is_warm = self._is_warm or self.steps > 0
            self.steps = 0
            self.clear()

    def end_step(self) -> None:
        """Count a step."""
        self.steps += 1

    def clear(self) -> None:
        """Forget everything but the steps."""
        self.events.clear()
        self.traffic.clear()
        self.busy_s.clear()

    def sent(self, axis: str, layer: str, num_bytes: int, start: float) -> None:
        """Count an exchange that began at `start`, the waiting for others included."""
        seconds = time.perf_counter() - start
        seen = self.traffic[axis, layer]
        seen.num_bytes += num_bytes
        seen.seconds += seconds
        self._exchanged_s += seconds
        self._note(layer, axis, seconds)

    @contextmanager
    def busy(self, layer: str) -> Iterator[None]:
        """Count what a layer computes inside the block, without exchanges."""
        begun, start = self._now(), time.perf_counter()
        yield
        self._end(layer, begun, start)

    def watch_backward(self, layer: str, result: Tensor) -> None:
        """Count the backward pass of the operation that gave a result, too."""
        operation, begun, start = result.grad_fn, 0.0, 0.0
        if operation is None:
            return

        def begin(grads: Any) -> None:
            nonlocal begun, start
            begun, start = self._now(), time.perf_counter()

        def end(grads: Any, given: Any) -> None:
            self._end(layer, begun, start)

        operation.register_prehook(begin)
        operation.register_hook(end)

    def _end(self, layer: str, begun: float, start: float) -> None:
        self.busy_s[layer] += self._now() - begun
        self._note(layer, BUSY, time.perf_counter() - start)

    def _note(self, layer: str, what: str, seconds: float) -> None:
        """Keep an event that ends now; others of the same layer may lie within it."""
        if len(self.events) < _MOST:
            self.events.append((layer, what, time.time() - seconds, seconds))

    def _now(self) -> float:
        """The time, as if exchanges took none."""
        return time.perf_counter() - self._exchanged_s
