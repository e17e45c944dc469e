"""A Generation: the workers of a job until one is lost or joins, as the coordinator publishes it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Change:
    """A reason for a new generation: a worker was lost, joined or left."""

    kind: str  # lost | joined | left
    worker: str
    host: str
    why: str = ""

    def __str__(self) -> str:
        return f"worker {self.worker} on {self.host} {self.why or self.kind}"


@dataclass(frozen=True)
class Generation:
    """The workers in order of rank, and the changes since the last generation."""

    number: int
    training: int  # counts the trainings of a script from 1, as it may train more than once
    workers: tuple[str, ...]
    nodes: tuple[int, ...]  # the node of each worker, then of each giver
    planned: bool = False  # workers enter it after their step; if False, at once, as after a loss
    halt: bool = False  # workers save their state and stop, because too few are left
    since: float = 0.0  # Unix time at which the first change was noticed
    changes: tuple[Change, ...] = field(default_factory=tuple)
    spares: tuple[str, ...] = ()  # workers that wait until one is lost
    givers: tuple[str, ...] = ()  # those that only hand over what they have of the state, if it is in parts

    @property
    def everyone(self) -> tuple[str, ...]:
        """Who forms a group, in order of rank: the workers, then the givers."""
        return self.workers + self.givers

    def dump(self) -> dict[str, Any]:
        """Return a table for JSON."""
        return asdict(self)

    @classmethod
    def load(cls, table: dict[str, Any]) -> Generation:
        """Read a table that `dump` made; TypeError or KeyError if it is not one."""
        changes = tuple(Change(**change) for change in table["changes"])
        lists = {key: tuple(table[key]) for key in ("workers", "nodes", "spares", "givers")}
        return cls(**{**table, **lists, "changes": changes})
