"""The calls of one worker on all of its communicators, in order: when each began, and when it was done.

A line of JSON for each, written at once, so that the calls of a worker that hangs or is killed are there too.
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from pathlib import Path

POINT_TO_POINT = ("send", "recv")


@dataclass(frozen=True)
class Call:
    """One call of one worker. Workers are named by their rank among all."""

    number: int  # counts the calls of this worker
    worker: int
    communicator: str
    members: tuple[int, ...]  # of the communicator, in order of its ranks
    operation: str
    other: int | None  # the worker that it sends to or receives from, or the root
    num_bytes: int
    sent: tuple[int, ...]  # bytes to each member, if that is the caller's choice
    received: tuple[int, ...]
    dtype: str
    device: str
    thread: str

    @property
    def is_collective(self) -> bool:
        """Whether all members make it."""
        return self.operation not in POINT_TO_POINT

    @property
    def title(self) -> str:
        """The operation with the worker at its other end."""
        if self.other is None:
            return self.operation
        between = {"send": "to", "recv": "from"}.get(self.operation, "with root")
        return f"{self.operation} {between} worker {self.other}"

    def __str__(self) -> str:
        return f"{self.title} on '{self.communicator}' (call {self.number}, thread {self.thread})"


Event = Call | int  # a call begins; the call with this number is done


class CallLog:
    """Writes the calls of one worker, of all its threads, in the order in which they are made."""

    def __init__(self, folder: Path, worker: int) -> None:
        self.worker, self._count, self._lock = worker, 0, threading.Lock()
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"{worker}.jsonl"
        self._path.touch()

    def begin(self, fields: dict[str, object]) -> int:
        """Note that a call begins; gives its number."""
        thread = threading.current_thread().name
        with self._lock:
            self._count += 1
            row = {"number": self._count, "worker": self.worker, **fields, "thread": thread}
            self._write(json.dumps(row))
            return self._count

    def end(self, number: int) -> None:
        """Note that a call is done."""
        with self._lock:
            self._write(f"{number}")

    def _write(self, line: str) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def read_logs(folder: Path) -> dict[int, list[Event]]:
    """What the workers of a group have noted, by worker."""
    return {
        int(path.stem): [_event(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for path in sorted(folder.glob("*.jsonl"), key=lambda path: int(path.stem))
    }


def _event(line: str) -> Event:
    found = json.loads(line)
    if isinstance(found, int):
        return found
    tuples = {key: tuple(value) for key, value in found.items() if isinstance(value, list)}
    return Call(**{**found, **tuples})
