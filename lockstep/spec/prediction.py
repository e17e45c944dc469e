"""What `lockstep plan` predicted of a step, which a plan's file brings along to the run that follows it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lockstep.errors import SpecError
from lockstep.spec.field import accept_number
from lockstep.spec.run_file import read_toml

PARTS = ("step_s", "compute_s", "exchange_s", "hidden_s", "host_s", "data_s")
OF = ("batch", "lanes", "local_steps")  # of the run that was predicted


def read_prediction(text: str) -> dict[str, float]:
    """The seconds of the parts of a step, from the table `predicted` of a plan's file; empty without it."""
    if not text.endswith(".toml"):
        return {}
    table = read_toml(Path(text)).get("predicted", {})
    if not isinstance(table, Mapping):
        raise SpecError(f"--plan {text}: predicted must be a table: write [predicted]")
    for key in table:
        if key not in (*PARTS, *OF):
            raise SpecError(f"--plan {text}: predicted.{key}: choose from {', '.join((*PARTS, *OF))}")
    return {key: accept_number(f"predicted.{key}", value) for key, value in table.items()}
