"""Plays the noted calls of all workers through as NCCL would make them, and refuses what would hang.

NCCL makes the calls of a worker on one communicator one after another, in the order in which they began, each
when the other workers have come to theirs. So there is a queue for each worker and communicator, and a call
is done when it is at the head of all its workers' queues. A worker that noted a call after another one was
done makes it only then: what happened before may have been the cause.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from pathlib import Path

from lockstep.comm.recorded.call_log import Call, Event, read_logs
from lockstep.errors import LockstepError


def check_calls(folder: Path) -> int:
    """Refuse different calls on one communicator and any cycle of waits; gives the number of calls."""
    logs = read_logs(folder)
    players = _Players(logs)
    while players.advance():
        pass
    players.check_end()
    return sum(isinstance(event, Call) for log in logs.values() for event in log)


class _Players:
    """All workers, each at a place of its log."""

    def __init__(self, logs: dict[int, list[Event]]) -> None:
        self._logs, self._at = logs, dict.fromkeys(logs, 0)
        self._queues: dict[tuple[int, str], deque[Call]] = defaultdict(deque)
        self._waiting: dict[tuple[int, int], Call] = {}  # begun and not done, by worker and number

    def advance(self) -> bool:
        """Let every worker go on as far as it can, then do what can be done; False if nothing could."""
        for worker in self._logs:
            for event in self._coming(worker):
                if isinstance(event, Call):
                    self._queues[worker, event.communicator].append(event)
                    self._waiting[worker, event.number] = event
        heads = [queue[0] for queue in self._queues.values() if queue]
        return sum(map(self._try, heads)) > 0

    def check_end(self) -> None:
        """Refuse calls that are left, when nothing can be done any more."""
        if self._waiting:
            raise LockstepError("NCCL would hang here: " + " → ".join(self._find_cycle()))

    def _coming(self, worker: int) -> Iterator[Event]:
        """The next events of a worker, up to one that needs a call to be done."""
        log = self._logs[worker]
        while self._at[worker] < len(log):
            event = log[self._at[worker]]
            if not isinstance(event, Call) and (worker, event) in self._waiting:
                return
            self._at[worker] += 1
            yield event

    def _head(self, worker: int, communicator: str) -> Call | None:
        queue = self._queues[worker, communicator]
        return queue[0] if queue else None

    def _try(self, call: Call) -> bool:
        """Do a call if all its workers have come to it; refuse it if they have come to another one."""
        if self._head(call.worker, call.communicator) is not call:
            return False  # done already, with another worker's
        found = [self._head(member, call.communicator) for member in _parties(call)]
        theirs = [other for other in found if other]
        for other in theirs:
            if (call.is_collective and other.is_collective) or _are_ends(call, other):
                _compare(call, other)
        if len(theirs) < len(found) or not all(_matches(call, other) for other in theirs):
            return False
        for done in theirs:
            self._queues[done.worker, done.communicator].popleft()
            del self._waiting[done.worker, done.number]
        return True

    def _find_cycle(self) -> list[str]:
        """Who waits for whom, from one worker on until it comes back to one that was there before."""
        call: Call | None = self._blocking(min(worker for worker, _ in self._waiting))
        trail: list[Call] = []
        while call and call not in trail:
            trail.append(call)
            for worker in _parties(call):
                theirs = self._head(worker, call.communicator)
                if not theirs or not _matches(call, theirs):
                    break
            call = theirs or self._blocking(worker)
        if call is None:
            return [*map(_tell, trail), f"worker {worker}, which never makes that call"]
        return [*map(_tell, trail[trail.index(call) :]), f"worker {call.worker}, where this began"]

    def _blocking(self, worker: int) -> Call | None:
        """The call at the head of the queue in which a worker waits; None if it made all of its calls."""
        log, at = self._logs[worker], self._at[worker]
        if at < len(log):
            event = log[at]
            assert not isinstance(event, Call)
            call = self._waiting[worker, event]
        else:
            left = [call for (who, _), call in self._waiting.items() if who == worker]
            if not left:
                return None
            call = left[0]
        return self._head(worker, call.communicator)


def _parties(call: Call) -> tuple[int, ...]:
    """The workers that make a call together."""
    if call.is_collective:
        return call.members
    assert call.other is not None
    return (call.worker, call.other)


def _are_ends(call: Call, other: Call) -> bool:
    """Whether one sends what the other receives."""
    both = {call.operation, other.operation} == {"send", "recv"}
    return both and call.other == other.worker and other.other == call.worker


def _matches(call: Call, other: Call) -> bool:
    same = call.is_collective and call.operation == other.operation
    return call is other or same or _are_ends(call, other)


def _compare(call: Call, other: Call) -> None:
    """Refuse calls that meet and do not fit."""
    if call.is_collective and call.title != other.title:
        what = "different calls"
    elif call.sent:
        here, there = call.members.index(call.worker), call.members.index(other.worker)
        if call.sent[there] == other.received[here]:
            return
        what = f"{call.sent[there]} bytes sent and {other.received[here]} expected"
    elif call.num_bytes != other.num_bytes:
        what = f"{call.num_bytes} and {other.num_bytes} bytes"
    else:
        return
    raise LockstepError(f"{what}: worker {call.worker} has {call}, and worker {other.worker} has {other}")


def _tell(call: Call) -> str:
    return f"worker {call.worker} waits in {call}"
