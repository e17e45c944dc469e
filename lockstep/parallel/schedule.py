"""When a stage computes which lane: the schedules of a pipeline, whose micro-batches are lanes.

Lanes are numbered 0…M−1 among those of one worker. Backward passes come in the order of lanes, which the lane
tree needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Turn:
    """One forward or backward pass of a lane through a stage."""

    kind: Literal["forward", "backward"]
    lane: int


@dataclass
class Position:
    """Which stage of how many this is."""

    number: int
    count: int

    @property
    def is_first(self) -> bool:
        return self.number == 0

    @property
    def is_last(self) -> bool:
        return self.number == self.count - 1


def make_schedule(name: str, stage: int, stages: int, lanes: int) -> list[Turn]:
    """The turns of a stage, in order.

    `gpipe` computes all forward passes first, so every lane's activations wait at once. `1f1b` begins
    backward passes as early as it can: at most `stages − stage` lanes wait, and the pipeline is as fast.
    """
    ahead = lanes if name == "gpipe" else min(stages - 1 - stage, lanes)
    turns = [Turn("forward", lane) for lane in range(ahead)]
    for lane in range(lanes):
        turns += [Turn("forward", lane + ahead)] if lane + ahead < lanes else []
        turns.append(Turn("backward", lane))
    return turns


def bubble(stages: int, lanes: int) -> float:
    """The share of time that a stage of a balanced pipeline waits: (P − 1) / (M + P − 1), by any schedule."""
    return (stages - 1) / (lanes + stages - 1)
