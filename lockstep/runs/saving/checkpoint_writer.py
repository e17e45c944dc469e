"""Writes checkpoints beside training: from a copy of the state, in a thread, one at a time.

Training waits while the state is copied. It waits for a checkpoint only where the next one is due before that
one is whole, so the newest whole one lags by less than two intervals; and where a run stops or ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass

from lockstep.comm.background import BackgroundThread
from lockstep.runs.checkpoint import NewCheckpoint
from lockstep.runs.saving.state_copy import StateCopy
from lockstep.runs.state_parts import PartsFile, StateParts, StatePiece
from lockstep.runs.train_state import TrainState

Report = Callable[[NewCheckpoint, OSError | None], None]


@dataclass
class _Writing:
    """The checkpoint that is being written."""

    step: int
    done: Future[None]  # this worker's present part of the work
    new: NewCheckpoint | None  # on worker 0, which commits it
    parts: StateParts | None = None  # as long as other workers write parts of it, too


class CheckpointWriter:
    """What one worker writes of the checkpoints of a run."""

    def __init__(self, report: Report) -> None:
        """`report` is called on worker 0, by the thread that trains, once a checkpoint is whole or failed."""
        self._report, self._copy = report, StateCopy()
        self._thread: BackgroundThread[None] | None = None
        self._writing: _Writing | None = None

    @property
    def step(self) -> int:
        """The step of the checkpoint that is being written; -1 if there is none."""
        return self._writing.step if self._writing else -1

    def begin(self, state: TrainState, new: NewCheckpoint | None) -> None:
        """Copy the state and begin to write it, after `settle`; worker 0 says where.

        A collective if several workers have parts of the state.
        """
        assert self._writing is None
        own, parts = state.pieces(), state.parts
        if not parts or not parts.is_shared:
            assert new
            copied = self._copy.take(own)
            self._writing = _Writing(state.step, self._submit(lambda: new.write(copied)), new)
            return
        try:
            file = parts.open(own, new.temporary if new else None)
            parts.gather(own, file)
            copied = self._copy.take(file.chosen(own))
        except BaseException:
            if new:
                new.discard()
            raise
        done = self._submit(lambda: _write_parts(file, copied))
        self._writing = _Writing(state.step, done, new, parts)

    def settle(self, wait: bool = False) -> None:
        """Report the checkpoint that is being written if it is whole or has failed; `wait` until then.

        A collective while several workers write their parts: all call it after the same steps.
        """
        if self._writing and self._writing.parts:
            self._agree(self._writing, self._writing.parts, wait)
        writing = self._writing
        if writing and writing.new and not writing.parts and (wait or writing.done.done()):
            error = _find_error(writing.done)
            self._writing = None
            self._report(writing.new, error)

    def close(self) -> None:
        """Wait for what can still become whole; that cannot which not all are known to have written."""
        writing, self._writing = self._writing, None
        if writing:
            wait([writing.done])
            if writing.new and writing.parts:
                writing.new.discard()
        if self._thread:
            self._thread.close()
            self._thread = None

    def _agree(self, writing: _Writing, parts: StateParts, is_last: bool) -> None:
        """Let worker 0 commit once all workers have written their parts."""
        if is_last:
            wait([writing.done])
        is_done = writing.done.done()
        all_done, error = parts.agree(is_done, _find_error(writing.done) if is_done else None)
        if not all_done:
            return
        writing.parts, new = None, writing.new
        if new is None:
            self._writing = None
        elif error is None:
            writing.done = self._submit(new.commit)
        else:
            new.discard()
            self._writing = None
            self._report(new, error)

    def _submit(self, work: Callable[[], None]) -> Future[None]:
        self._thread = self._thread or BackgroundThread("checkpoint", None)
        return self._thread.submit(work)


def _write_parts(file: PartsFile, pieces: Sequence[StatePiece]) -> None:
    for piece in pieces:
        file.put(piece)
    if error := file.close():
        raise error


def _find_error(done: Future[None]) -> OSError | None:
    """What went wrong with the disk; waits for the end."""
    try:
        done.result()
    except OSError as error:
        return error
    return None
