"""A Generation: one membership of workers, as the coordinator publishes it and every worker reads it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Change:
    """Why a generation is another than the one before: a worker was lost, joined or left."""

    kind: str  # lost | joined | left
    worker: str
    host: str
    why: str = ""

    def __str__(self) -> str:
        return f"worker {self.worker} on {self.host} {self.why or self.kind}"


@dataclass(frozen=True)
class Generation:
    """The workers in order of rank, and what brought them together."""

    number: int
    training: int  # a script may train more than once; this is its how-manieth time
    workers: tuple[str, ...]
    nodes: tuple[int, ...]  # the node of each worker
    planned: bool = False  # its workers move over after a step; otherwise at once, as someone is lost
    halt: bool = False  # they save their state and stop: too few are left
    since: float = 0.0  # when the first of its changes was seen, in seconds of the epoch
    changes: tuple[Change, ...] = field(default_factory=tuple)

    def dump(self) -> dict[str, Any]:
        """As a table for JSON."""
        return asdict(self)

    @classmethod
    def load(cls, table: dict[str, Any]) -> Generation:
        """From a table; a TypeError or KeyError where it is none."""
        changes = tuple(Change(**change) for change in table["changes"])
        lists = {"workers": tuple(table["workers"]), "nodes": tuple(table["nodes"]), "changes": changes}
        return cls(**{**table, **lists})
