"""A record of what a bench measured here."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Sequence
from typing import Any

import torch

from lockstep.spec import Record


def make_lab_record(name: str, seconds: Sequence[float], command: str, **details: Any) -> Record:
    """The median of the rounds, with the machine's facts."""
    return Record(
        name=name,
        value=statistics.median(seconds),
        unit="s",
        n=len(seconds),
        spread=(min(seconds), max(seconds)),
        hardware=_hardware(),
        command=command,
        commit="",
        versions={"python": platform.python_version(), "torch": torch.__version__},
        details=details,
    )


def _hardware() -> str:
    from lockstep.measure.probe_device import name_device

    names = [name_device(torch.device("cpu"))]
    if torch.cuda.is_available():
        names.insert(0, torch.cuda.get_device_name(0))
    return ", ".join(names)
