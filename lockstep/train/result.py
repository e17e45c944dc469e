"""What a step gives to the loop, and a finished run to the user: directory, summary and the trained model."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn


@dataclass(frozen=True)
class StepResult:
    """What a step reports; reduced over all lanes, so it is the same on every worker."""

    loss: float
    correct: int
    lr: float
    stop: bool = False  # whether any worker was asked to stop
    move: bool = False  # whether any worker knows of a generation to move to
    seconds: float = 0.0  # how long it took; 0: the time since the step before
    waited_s: float = 0.0  # how much of that was spent waiting for data
    compute_s: float = field(default=0.0, compare=False)  # and until its lanes were done; 0: not known
    exchange_s: float = 0.0  # and then waiting for gradients of other workers; not known on the device
    hidden_s: float = field(default=0.0, compare=False)  # what their exchange took beside computing
    steps: int = 1  # of the run, which every lane took by itself: the seconds are those of all of them
    scale: float | None = None  # of the loss, in fp16
    skipped: bool = False  # whether its gradients were not finite in fp16, so that nothing was updated


@dataclass(frozen=True)
class Result:
    """A finished run: its directory, its summary, and the trained model; the same on every worker.

    Only `rank` differs: this worker's rank in the last generation.
    """

    directory: Path
    summary: dict[str, Any]
    model: nn.Module
    rank: int = 0

    def __repr__(self) -> str:
        """One line, without the model."""
        found = f"loss {self.summary['loss']:.4f}"
        if "accuracy" in self.summary:
            found = f"accuracy {100 * self.summary['accuracy']:.2f} %"
        return f"Result({str(self.directory)!r}, {found}, weights_sha256 {self.summary['weights_sha256']})"
