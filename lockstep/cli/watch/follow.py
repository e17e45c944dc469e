"""Follows a run by its metrics.jsonl and hands it to a tracker, from what that has already to the end."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Protocol

_POLL_S = 1.0
PATIENCE_S = 30  # how long a tracker may take for the rest when no one is there any more
_PLACE = {"kind", "epoch", "step", "step_in_epoch", "steps"}  # where a row stands, and no measurement
_RECORD = "tracked.json"

Point = tuple[int, dict[str, float]]  # a step, and the values there by name


class Tracker(Protocol):
    """What a tracker must do; any of it may raise, which ends only the tracking."""

    def open(self, folder: Path, told: Mapping[str, Any], known: str) -> tuple[str, str]:
        """Begin a run, or go on with the `known` one; gives its id, and where to look at it."""

    def log(self, points: list[Point]) -> None:
        """Take measurements, in the order of their steps."""

    def close(self, state: str, summary: Mapping[str, Any]) -> None:
        """End the run: finished, stopped, failed, or lost if the process that trained was killed."""


def scalars(row: Mapping[str, Any]) -> dict[str, float]:
    """The measurements in a row of metrics.jsonl, whatever they are called."""
    found = {key: value for key, value in row.items() if key not in _PLACE}
    return {key: value for key, value in found.items() if type(value) in (int, float)}


class Words:
    """What worker 0 tells, read beside what the tracker does: the process ends soon after the last word."""

    def __init__(self, stream: IO[str]) -> None:
        self.first: dict[str, Any] = json.loads(stream.readline() or "{}")
        self.last: dict[str, Any] = {}
        self._stream, self._is_said = stream, threading.Event()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        with suppress(ValueError):
            self.last = json.loads(self._stream.readline())
        self.last = self.last or {"state": "lost", "summary": {}, "patience_s": PATIENCE_S}
        signal.alarm(self.last["patience_s"])
        self._is_said.set()

    def wait(self) -> bool:
        """Whether the last word is said; waits a little for it."""
        return self._is_said.wait(_POLL_S)


def follow(tracker: Tracker, words: Words, say: Callable[[str], None]) -> None:
    """Hand a run to a tracker, from the first step that it does not have yet to the end."""
    folder = Path(words.first["folder"])
    lock = os.open(folder, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)  # the one before may be at its last rows, if another is worker 0 now
    rows = _Rows(folder.parent / "metrics.jsonl", folder / _RECORD)
    rows.known["id"], where = tracker.open(folder, words.first, rows.known["id"])
    rows.remember()
    say(f"tracked at {where}")
    is_over = False
    while not is_over:
        is_over = words.wait()
        if points := rows.read():
            tracker.log(points)
            rows.remember()
    tracker.close(words.last["state"], words.last["summary"])
    os.close(lock)


class _Rows:
    """The rows of metrics.jsonl that the tracker does not have; which those are is kept in a file.

    Steps that are done again after a kill have the same values, so the tracker gets them once.
    """

    def __init__(self, metrics: Path, record: Path) -> None:
        self._metrics, self._record = metrics, record
        self._offset = self._file = 0
        self.known: dict[str, Any] = {"id": "", "step": 0, "epoch": -1}
        if record.is_file():
            self.known |= json.loads(record.read_text())

    def read(self) -> list[Point]:
        """The measurements that came since the last call."""
        with self._metrics.open("rb") as file:
            found = os.fstat(file.fileno()).st_ino
            if found != self._file:  # the first time, or rows were dropped that are done again
                self._file, self._offset = found, 0
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [point for line in whole.splitlines() if (point := self._take(json.loads(line)))]

    def _take(self, row: dict[str, Any]) -> Point | None:
        kind = row["kind"]
        if kind not in ("step", "epoch") or row[kind] <= self.known[kind]:
            return None
        self.known[kind] = row[kind]
        return row["step"], {f"{kind}/{name}": value for name, value in scalars(row).items()}

    def remember(self) -> None:
        """Keep the tracked run's id, and what it has."""
        new = self._record.with_suffix(".new")
        new.write_text(json.dumps(self.known) + "\n")
        new.replace(self._record)
