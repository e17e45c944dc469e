"""Draws numbers for each sample of a batch, on the host, keyed by seed, epoch and what they are for."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lockstep.kernels import random

_CHANCES = 1 << 24


@dataclass(frozen=True)
class SampleDraw:
    """Draws one number for each of `ids`; the same name gives the same numbers."""

    seed: int
    epoch: int
    ids: Tensor

    def integers(self, what: str, low: int, high: int) -> Tensor:
        """Whole numbers from `low` to `high`, both included."""
        key = random.key("augment", self.seed, self.epoch, what)
        return random.integers(key, self.ids, high - low + 1) + low

    def chance(self, what: str, p: float) -> Tensor:
        """True with probability `p`."""
        return self.integers(what, 0, _CHANCES - 1) < round(p * _CHANCES)
