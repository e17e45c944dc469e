"""The cursor of a user's script: where it is, and the state that waits until the script has come there."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lockstep.errors import LockstepError
from lockstep.lanes.state_tree import PackedState

_A = {"step": "a step", "evaluation": "an evaluation", "save": "a save", "end": "the end of its epochs"}


@dataclass
class Cursor:
    """Where a script is: epoch, pass over a loader, batch; and the results of the rounds since that batch."""

    epoch: int = -1  # -1 before and outside `session.epochs`
    loader: int = -1  # which pass over a loader in this epoch; -1 before the first
    batch: int = -1  # the batch that was begun last in that pass
    data: str = ""  # what is read in that pass: number of samples and batch size
    step: int = 0  # steps taken
    saved: int = 0  # steps taken when the state was last saved
    results: list[Any] = field(default_factory=list)
    before: list[Any] = field(default_factory=list)  # the results of rounds before the first epoch

    def dump(self) -> dict[str, Any]:
        """A table for JSON."""
        return dict(vars(self))


@dataclass
class Arrival:
    """A state to be taken when the script comes to where it was saved, or to where the others are."""

    state: PackedState
    source: str
    before: list[Any]  # recorded results of rounds that come before the cursor's place
    results: list[Any]  # and of those that come after it
    is_near: bool  # whether the script has come to the cursor's place

    @property
    def coming_steps(self) -> int:
        """Steps that are still to be passed over."""
        return [kind for kind, _ in self.results].count("step")

    def take(self, kind: str) -> dict[str, float] | None:
        """The recorded result of the coming round; None if there is none, and the script has arrived."""
        recorded = self.results if self.is_near else self.before
        if not recorded and self.is_near:
            return None
        if not recorded:
            raise LockstepError(
                "the script does something between epochs that cannot be passed over on the way to where it "
                "goes on: write its loop as `for epoch in session.epochs(…)`"
            )
        was, result = recorded.pop(0)
        if was != kind:
            raise LockstepError(
                f"{self.source}: the script comes to {_A[kind]} where it came to {_A[was]} before: it was "
                "changed, or it counts something by itself; count by session.steps and batch.number"
            )
        found: dict[str, float] = result
        return found
