"""How one call of a model is computed under a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lockstep.parallel.model_graph import Values
from lockstep.parallel.split.lane_gradients import GradientPart
from lockstep.parallel.split.spread import WHOLE, Spread

# Parts of a layer's work: its output, and the gradients of its input, weights and biases.
FORWARD, INPUT, WEIGHT, BIAS = "forward", "input", "weight", "bias"


@dataclass
class Way:
    """A rule with its numbers: what it computes, and how the result lies on workers."""

    rule: str  # in a few words, for people
    run: Callable[[Values], Any]
    made: Spread = WHOLE
    work: Mapping[str, float] = field(default_factory=dict)  # multiplications: forward, input, weight
    by_channel: set[str] = field(default_factory=set)  # which of these are cut by channels; a probe may clear
    by_band: set[str] = field(default_factory=set)  # which are computed band by band, by one worker, too
    inner_first: set[str] = field(default_factory=set)  # whose inner rows do not wait for the halo; likewise
    by_slice: set[str] = field(default_factory=set)  # which by slices of channels, likewise
    cut: Any = None  # the numbers of a convolution, or of a fully connected layer
    exact: bool = False  # each element by itself
    gradients: Mapping[str, GradientPart] = field(default_factory=dict)  # of its parameters, if not whole

    def share(self, channel: int, spatial: int) -> float:
        """The part of its multiplications that is cut by all axes that have several workers."""
        total = sum(self.work.values())
        rows = spatial == 1 or bool(self.made.rows)
        cut = [w for part, w in self.work.items() if rows and (channel == 1 or part in self.by_channel)]
        return sum(cut) / total if total else 0.0
