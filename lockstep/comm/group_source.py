"""The interface by which training asks for its next group of workers; `elastic` implements it.

A source gives either one group for the whole run (one process, torchrun, mpirun) or one for each generation
(our own launcher). Training does not know which.
"""

from __future__ import annotations

from typing import Protocol

from lockstep.comm.group import Group
from lockstep.spec.generation import Generation


class LeftOut(Exception):
    """The job goes on without this worker, or is over."""


class GroupSource(Protocol):
    """Gives a worker its groups, and reports their progress to the launcher."""

    generation: Generation | None  # of the current group, whose givers come last; None if there are none

    @property
    def is_elastic(self) -> bool:
        """Whether training goes on in a new group after one is lost."""

    @property
    def joins(self) -> bool:
        """Whether this worker joins a job that may already be running."""

    @property
    def wants_to_move(self) -> bool:
        """Whether another generation is planned, which this worker should enter after its step."""

    @property
    def run(self) -> str | None:
        """The run's directory, once a worker has made it."""

    def next(self) -> Group:
        """The next group; LeftOut if there is none for this worker."""

    def drop(self, group: Group) -> None:
        """Leave a group that is lost."""

    def leave(self, group: Group) -> None:
        """Leave a group in good order, together with all its workers."""

    def tell_job(self, run: str, identity: dict[str, object]) -> None:
        """Tell the job's coordinator the run's identity and directory."""

    def ask_identity(self) -> dict[str, object] | None:
        """The identity of the job that this worker joins, if it has begun."""

    def settle(self) -> None:
        """Report that this worker has the generation's groups and state: others may join after a step."""

    def confirm(self) -> None:
        """Report that the generation has completed a step."""

    def tell_end(self, code: int, rank: int) -> None:
        """Report that the training is over for all workers."""
