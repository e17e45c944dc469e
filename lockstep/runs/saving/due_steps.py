"""After which steps of a run a checkpoint is due, and when its workers ask each other if one is written."""

from __future__ import annotations

from collections.abc import Callable

from lockstep.runs.train_state import TrainState
from lockstep.spec import Run


class DueSteps:
    """The steps after which checkpoints begin: every so many, at the end of a round, and an epoch's last.

    All of it is a function of the state's step, so that all workers decide alike.
    """

    def __init__(self, run: Run, state: TrainState) -> None:
        self._every, self._round, self._state = run.checkpoint.every_steps, run.train.local_steps, state
        self._writes_parts = state.parts is not None and state.parts.is_shared

    def is_due(self) -> bool:
        """Whether a checkpoint is due after the step that was committed last, or one of its round."""
        return self._state.step_in_epoch == 0 or self._is_any(self.is_due_at)

    def is_due_at(self, step: int) -> bool:
        """Whether one is due after this step, if it is not an epoch's last."""
        return step % self._every == 0

    def last(self) -> int:
        """The last step, up to the present one, after which one was due."""
        state = self._state
        return max(state.step - state.step % self._every, state.step - state.step_in_epoch)

    def asks(self) -> bool:
        """Whether to look now if a checkpoint is whole; where workers write parts, this is a collective."""
        return not self._writes_parts or self._is_any(self.asks_at)

    def asks_at(self, step: int) -> bool:
        """Whether workers ask each other after this step: 1, 2, 4, 8 … steps after one was due."""
        begin = self._state.step - self._state.step_in_epoch  # of the epoch
        since = min(step % self._every, step - begin)
        return self._writes_parts and since > 0 and since & (since - 1) == 0

    def _is_any(self, wanted: Callable[[int], bool]) -> bool:
        last = (self._state.step_in_epoch - 1) % self._round + 1  # of a round: an epoch begins with one
        return any(wanted(self._state.step - n) for n in range(last))
