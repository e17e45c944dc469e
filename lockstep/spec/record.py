"""A Record: one measurement, with the facts needed to repeat it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Record:
    """A measured value and how it was measured; `spread` is (lowest, highest) of `n` measurements."""

    name: str
    value: float
    unit: str
    n: int
    spread: tuple[float, float]
    hardware: str
    command: str
    commit: str
    versions: Mapping[str, str]
    details: Mapping[str, Any] = field(default_factory=dict)


def write_records(path: Path, records: list[Record]) -> None:
    """Write records as a JSON list, one file for each run of a benchmark."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([asdict(record) for record in records], indent=1) + "\n", encoding="utf-8")


def read_records(path: Path) -> list[Record]:
    """Read what `write_records` wrote."""
    rows = json.loads(path.read_text(encoding="utf-8"))
    return [Record(**{**row, "spread": tuple(row["spread"])}) for row in rows]
