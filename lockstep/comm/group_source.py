"""Where a worker's groups come from: one for good under torchrun and mpirun, one a generation under ours.

Training asks for the next group and does not know which of these it is; `elastic` has both.
"""

from __future__ import annotations

from typing import Protocol

from lockstep.comm.group import Group
from lockstep.spec.generation import Generation


class LeftOut(Exception):
    """The job goes on without this worker, or is over."""


class GroupSource(Protocol):
    """Gives a worker its groups, and tells those who watch the job what became of them."""

    generation: Generation | None  # that the group belongs to; None where there are no generations

    @property
    def is_elastic(self) -> bool:
        """Whether a lost group is followed by another."""

    @property
    def joins(self) -> bool:
        """Whether this worker comes to a job that may run already."""

    @property
    def wants_to_move(self) -> bool:
        """Whether another generation is planned, to begin after a step."""

    @property
    def run(self) -> str | None:
        """The run's directory, once a worker has made it."""

    def next(self) -> Group:
        """The next group; LeftOut if there is none for this worker."""

    def drop(self, group: Group) -> None:
        """Leave a group that is lost."""

    def leave(self, group: Group) -> None:
        """Leave a group in good order, as all its workers do."""

    def tell_job(self, run: str, identity: dict[str, object]) -> None:
        """Let the job know what is trained, and where its files are."""

    def ask_identity(self) -> dict[str, object] | None:
        """The identity of the job that this worker joins, if it has begun."""

    def confirm(self) -> None:
        """The generation has completed a step."""

    def tell_end(self, code: int, rank: int) -> None:
        """The training is over, for all workers alike."""
