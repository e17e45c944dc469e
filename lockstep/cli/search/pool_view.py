"""Shows how far the runs of a sweep are: bars on a terminal, a line for each start and end elsewhere."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from lockstep.cli.search.swept_run import SweptRun

_LOOK_EVERY_S = 0.5
_TAIL_BYTES = 8192  # of metrics.jsonl, which hold its last rows


class PoolView:
    """A context manager; everything goes to stderr, since stdout is for the table or the records."""

    def __init__(self, stream: TextIO, number: int, done: int) -> None:
        self._console = Console(file=stream, highlight=False)
        self._number, self._done, self._looked = number, done, 0.0
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[told]}", markup=False),
            console=self._console,
            transient=True,
            auto_refresh=False,
        )
        self._all = self._bars.add_task("runs", total=number, completed=done, told=f"{done} of {number}")
        self._tasks: dict[str, tuple[SweptRun, TaskID]] = {}

    def __enter__(self) -> PoolView:
        if self._console.is_terminal:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def tell(self, text: str) -> None:
        """Print a line, above the bars."""
        self._console.print(f"lockstep sweep: {text}", markup=False, soft_wrap=True)

    def started(self, swept: SweptRun, epochs: int) -> None:
        """A run is being trained, until so many epochs are done."""
        task = self._bars.add_task(swept.name, total=swept.steps(epochs), told="starts")
        self._tasks[swept.name] = swept, task
        if not self._console.is_terminal:
            whole = swept.run.train.epochs
            part = f" to epoch {epochs} of {whole}" if epochs < whole else ""
            self.tell(f"{swept.name}: {'goes on' if swept.path.exists() else 'starts'}{part}")

    def ended(self, swept: SweptRun, seconds: float, failure: str, is_stopped: bool) -> None:
        """A training has ended: by itself, with last words, or as all were stopped."""
        _, task = self._tasks.pop(swept.name)
        self._bars.remove_task(task)
        row = read_last_row(swept.path, "epoch")
        found = f", {tell_row(row)}" if row else ""
        if failure:
            self.tell(f"{swept.name}: FAILED: {failure}")
        elif is_stopped:
            self.tell(f"{swept.name}: stopped")
        elif swept.is_finished:
            self._done += 1
            self._bars.update(self._all, completed=self._done, told=f"{self._done} of {self._number}")
            self.tell(f"{swept.name}: done in {seconds:,.0f} s{found} ({self._done} of {self._number})")
        else:
            self.tell(f"{swept.name}: paused{found}")

    def stopping(self, name: str, number: int) -> None:
        """A signal came; the runs have it, too."""
        which = f"{number} run{'s save their' if number != 1 else ' saves its'} state"
        self.tell(f"{name}: {which}; once more ends at once")

    def look(self, waiting: int) -> None:
        """Draw the bars anew from time to time."""
        if not self._console.is_terminal or time.monotonic() < self._looked + _LOOK_EVERY_S:
            return
        self._looked = time.monotonic()
        for swept, task in self._tasks.values():
            if row := read_last_row(swept.path, "step"):
                self._bars.update(task, completed=row["step"], told=tell_row(row))
        self._bars.update(self._all, told=f"{self._done} of {self._number}, {waiting} waiting")
        self._bars.refresh()


def read_last_row(path: Path, kind: str) -> dict[str, Any] | None:
    """The last whole row of a kind near the end of a run's metrics."""
    try:
        with (path / "metrics.jsonl").open("rb") as file:
            file.seek(max(file.seek(0, 2) - _TAIL_BYTES, 0))
            lines = file.read().split(b"\n")[:-1]
    except OSError:
        return None
    for line in reversed(lines):
        try:
            row: dict[str, Any] = json.loads(line)
        except ValueError:  # cut by where the tail begins
            continue
        if row.get("kind") == kind:
            return row
    return None


def tell_row(row: dict[str, Any]) -> str:
    """Where a run is, in words."""
    split = f"{row['split']} " if "split" in row else ""
    loss = row.get(f"{row.get('split')}_loss", row.get("loss", 0.0))
    accuracy = row.get(f"{row.get('split')}_accuracy", row.get("accuracy"))
    told = "" if accuracy is None else f"accuracy {100 * accuracy:.2f} %, "
    return f"epoch {row['epoch'] + 1}, {split}{told}loss {loss:.4f}"
