"""WeightsForm: how images were normalized, and their size, where given weights were trained.

`model.weights` starts from such weights; another form makes them worse, so that is said before training.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

_IDENTITY = "identity.json"  # of a run, beside the folder of its checkpoints
_NEAR = 0.01  # of a mean or a deviation, which few would see in the accuracy


@dataclass(frozen=True)
class WeightsForm:
    """Mean and standard deviation of each channel, and pixels a side."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    size: int

    @property
    def normalize(self) -> str:
        """As `data.normalize` says it."""
        return "/".join(",".join(f"{value:g}" for value in values) for values in (self.mean, self.std))

    def explain(self, mean: tuple[float, ...], std: tuple[float, ...], size: int) -> list[str]:
        """What to do where a run's images have another form."""
        found = []
        pairs = zip((*self.mean, *self.std), (*mean, *std), strict=False)
        if len(self.mean) == len(mean) and any(abs(theirs - ours) > _NEAR for theirs, ours in pairs):
            ours = WeightsForm(mean, std, size).normalize
            found.append(
                f"the weights were trained on images normalized by {self.normalize} (mean/std), and these "
                f"are by {ours}: set data.normalize={self.normalize}"
            )
        if self.size != size:
            found.append(f"the weights were trained at {self.size} pixels, and these images have {size}")
        return found


def file_form(path: Path) -> WeightsForm | None:
    """What an export of ours, or the run that a checkpoint is of, says; None if nothing does."""
    try:
        with safe_open(path, framework="pt") as file:
            told = json.loads((file.metadata() or {}).get("lockstep", "{}"))
        if "mean" in told:
            return _read_form(told, "")
        run = path.parent.parent / _IDENTITY
        return _read_form(json.loads(run.read_text()), "manifest.") if run.is_file() else None
    except (SafetensorError, OSError, ValueError, KeyError, TypeError):
        return None  # the file itself is refused when it is loaded


def _read_form(table: dict[str, Any], prefix: str) -> WeightsForm:
    mean, std, shape = (table[f"{prefix}{key}"] for key in ("mean", "std", "shape"))
    return WeightsForm(tuple(mean), tuple(std), int(shape[-1]))
