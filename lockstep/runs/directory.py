"""The files of a run's directory: reads and writes them, cuts logs at a resume, names and locks it.

run.toml · identity.json · metrics.jsonl · checkpoints/ · summary.json · curves.png · trace.jsonl
"""

from __future__ import annotations

import fcntl
import json
import math
import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from lockstep.errors import BadInput, LockstepError
from lockstep.runs.checkpoint import write_durably
from lockstep.spec import Run
from lockstep.spec.identity import Identity
from lockstep.spec.run_file import dump_toml, from_table, read_toml


class RunDirectory:
    """The files of one run; one process at a time writes them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self._logs: dict[str, IO[str]] = {}
        self._lock: IO[str] | None = None

    @classmethod
    def create(
        cls, runs_dir: Path, name: str, announce: Callable[[Path], None] | None = None
    ) -> RunDirectory:
        """Make a new directory; a name that exists gets a suffix. `announce` is called before it is made."""
        try:
            runs_dir.mkdir(parents=True, exist_ok=True)
            number = 1
            while True:
                path = runs_dir / (name if number == 1 else f"{name}-{number}")
                number += 1
                if not path.exists():
                    if announce:
                        announce(path)
                    with suppress(FileExistsError):
                        path.mkdir()
                        return cls(path)
        except OSError as error:
            raise BadInput(
                f"--runs-dir {runs_dir}: cannot make a directory there: {error.strerror}"
            ) from None

    @classmethod
    def find(cls, runs_dir: Path, run: str) -> RunDirectory:
        """The directory of a run given as a path or a name."""
        for path in (Path(run), runs_dir / run):
            if (path / "identity.json").is_file():
                return cls(path)
        raise BadInput(f"no run '{run}': neither {Path(run)} nor {runs_dir / run} is a run's directory")

    @classmethod
    def newest(cls, runs_dir: Path, name: str) -> RunDirectory | None:
        """The run that `--resume auto` means: the one of this name with the highest suffix."""
        pattern = re.compile(re.escape(name) + r"(?:-(\d+))?")
        found = {}
        for path in runs_dir.iterdir() if runs_dir.is_dir() else ():
            match = pattern.fullmatch(path.name)
            if match and (path / "identity.json").is_file():
                found[int(match[1] or 1)] = path
        return cls(found[max(found)]) if found else None

    def describe(self, run: Run, identity: Identity) -> None:
        """Write run.toml, then identity.json; a directory with identity.json counts as a run."""
        write_durably(self.path / "run.toml", dump_toml(run).encode())
        self.write_identity(identity)

    def write_identity(self, identity: Identity) -> None:
        """Write identity.json, for a new run or for a resumed run whose data was changed."""
        write_durably(self.path / "identity.json", (json.dumps(identity, indent=1) + "\n").encode())

    def run(self) -> Run:
        """The Run that this directory was made for."""
        return from_table(read_toml(self.path / "run.toml"))

    def identity(self) -> Identity:
        """The run's identity, as identity.json records it."""
        return dict(self._read_json("identity.json"))

    def summary(self) -> dict[str, Any] | None:
        """The contents of summary.json; None while the run is not finished."""
        return self._read_json("summary.json") if (self.path / "summary.json").is_file() else None

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write summary.json, which marks the run as finished."""
        write_durably(self.path / "summary.json", (json.dumps(summary, indent=1) + "\n").encode())

    def hold(self, patience_s: float = 0.0) -> None:
        """Lock the directory until the process ends or closes it; wait up to `patience_s` for the lock."""
        end = time.monotonic() + patience_s
        try:
            self._lock = (self.path / ".lock").open("a")
        except OSError as error:
            raise BadInput(f"{self.path}: cannot be written: {error.strerror}") from None
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError:
                if time.monotonic() < end:
                    time.sleep(0.02)
                    continue
            self.close()
            raise LockstepError(
                f"{self.path} is being trained by another process: wait, or use another --name"
            )

    def start_log(self, name: str, step: int, epoch: float = math.inf) -> list[dict[str, Any]]:
        """Open a JSONL file for `add_row`; drop rows of steps that will be done again, return the others."""
        path = self.path / name
        data = path.read_bytes() if path.is_file() else b""
        rows = [row for row in data.split(b"\n") if _is_before(row, step, epoch)]
        kept = b"".join(row + b"\n" for row in rows)
        if kept != data:
            write_durably(path, kept)
        self._logs[name] = path.open("a", encoding="utf-8", buffering=1)
        return list(map(json.loads, rows))

    def read_rows(self, name: str) -> list[dict[str, Any]]:
        """The rows of a JSONL file; none if it cannot be read."""
        found, text = [], ""
        with suppress(OSError, ValueError):
            text = (self.path / name).read_text(encoding="utf-8")
        for row in text.splitlines():
            with suppress(ValueError):  # a full disk may have cut one
                found.append(json.loads(row))
        return found

    def add_row(self, name: str, row: dict[str, Any], warn: Callable[[str], None]) -> None:
        """Append a row to an open file; if the disk is full, the row is lost and the run goes on."""
        try:
            self._logs[name].write(json.dumps(row) + "\n")
        except OSError as error:
            warn(f"{name}: a row was lost: {error.strerror}")

    def close(self) -> None:
        """Close the files and release the lock."""
        for file in (*self._logs.values(), self._lock):
            if file:
                with suppress(OSError):  # a full disk may not take the last rows
                    file.close()
        self._logs, self._lock = {}, None

    def _read_json(self, name: str) -> dict[str, Any]:
        try:
            table: dict[str, Any] = json.loads((self.path / name).read_text(encoding="utf-8"))
            return dict(table)
        except (OSError, ValueError, TypeError) as error:
            raise BadInput(f"{self.path / name}: cannot be read, so the run is incomplete: {error}") from None


def is_done(row: dict[str, Any], step: int, epoch: float) -> bool:
    """Whether a row is of work that will not be done again, or of workers lost and joined."""
    if row.get("kind") == "generation":
        return "step" in row
    again = row.get("kind") == "epoch" and row["epoch"] >= epoch  # it will be evaluated again
    return bool(row["step"] <= step) and not again


def _is_before(line: bytes, step: int, epoch: float) -> bool:
    """Whether a row is whole, and of work that will not be done again or of workers lost and joined."""
    try:
        return is_done(json.loads(line), step, epoch)
    except (ValueError, KeyError, TypeError, AttributeError):
        return False
