"""What `lockstep plan` predicted of a step, which a plan's file brings along to the run that follows it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lockstep.errors import SpecError
from lockstep.spec.field import accept_number
from lockstep.spec.run_file import read_toml

PARTS = ("step_s", "compute_s", "exchange_s", "hidden_s", "host_s", "data_s")
OF = ("batch", "lanes", "local_steps", "wire", "compress")  # of the run that was predicted
_TEXTS = ("wire", "compress")


def read_prediction(text: str) -> dict[str, float | str]:
    """The table `predicted` of a plan's file: seconds of a step's parts, and what `OF` names; or nothing."""
    if not text.endswith(".toml"):
        return {}
    table = read_toml(Path(text)).get("predicted", {})
    if not isinstance(table, Mapping):
        raise SpecError(f"--plan {text}: predicted must be a table: write [predicted]")
    for key in table:
        if key not in (*PARTS, *OF):
            raise SpecError(f"--plan {text}: predicted.{key}: choose from {', '.join((*PARTS, *OF))}")
    return {
        key: str(value) if key in _TEXTS else accept_number(f"predicted.{key}", value)
        for key, value in table.items()
    }
