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
    """Mean and standard deviation of each channel, pixels a side, and classes if they are known."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    size: int
    classes: tuple[str, ...] = ()

    @property
    def normalize(self) -> str:
        """As `data.normalize` says it."""
        return "/".join(",".join(f"{value:g}" for value in values) for values in (self.mean, self.std))

    def explain(self, own: WeightsForm) -> list[str]:
        """What to do where a run's images have another form, which is `own`."""
        found = []
        pairs = zip((*self.mean, *self.std), (*own.mean, *own.std), strict=False)
        if len(self.mean) == len(own.mean) and any(abs(theirs - ours) > _NEAR for theirs, ours in pairs):
            found.append(
                f"the weights were trained on images normalized by {self.normalize} (mean/std), and these "
                f"are by {own.normalize}: set data.normalize={self.normalize}"
            )
        if self.size != own.size:
            found.append(f"the weights were trained at {self.size} pixels, and these images have {own.size}")
        if len(self.classes) == len(own.classes) and self.classes != own.classes:
            found.append("the head is kept, though it was trained on as many classes of other names")
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
    mean, std, shape, classes = (table[f"{prefix}{key}"] for key in ("mean", "std", "shape", "classes"))
    return WeightsForm(tuple(mean), tuple(std), int(shape[-1]), tuple(classes))
