"""The interface by which training asks for its next group of workers; `elastic` implements it.

Training asks for the next group and does not know which of the two it is; `elastic` implements both.
"""

from __future__ import annotations

from typing import Protocol

from lockstep.comm.group import Group
from lockstep.spec.generation import Generation


class LeftOut(Exception):
    """The job goes on without this worker, or is over."""


class GroupSource(Protocol):
    """Gives a worker its groups, and reports to the launcher what became of them."""

    generation: Generation | None  # of the current group; None if there are no generations

    @property
    def is_elastic(self) -> bool:
        """Whether a lost group is followed by another."""

    @property
    def joins(self) -> bool:
        """Whether this worker joins a job that may already be running."""

    @property
    def wants_to_move(self) -> bool:
        """Whether another generation is planned, which begins between two steps."""

    @property
    def run(self) -> str | None:
        """The run's directory, once a worker has made it."""

    def next(self) -> Group:
        """The next group; LeftOut if there is none for this worker."""

    def drop(self, group: Group) -> None:
        """Leave a group that is lost."""

    def leave(self, group: Group) -> None:
        """Leave a group at its end, as all its workers do."""

    def tell_job(self, run: str, identity: dict[str, object]) -> None:
        """Tell the job what is trained, and where its files are."""

    def ask_identity(self) -> dict[str, object] | None:
        """The identity of the job that this worker joins, if it has begun."""

    def confirm(self) -> None:
        """Report that the generation has completed a step."""

    def tell_end(self, code: int, rank: int) -> None:
        """Report that the training is over, for all workers."""
