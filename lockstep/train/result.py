"""`Result`, what a finished run gives: directory, summary and the trained model; the loop makes it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn


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
