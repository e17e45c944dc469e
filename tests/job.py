"""A training job as a real process with real workers, for tests that hurt it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from small import OVERRIDES, rows, summary, train_command

PATIENCE_S = 45.0


class Job:
    """`lockstep train` of the small run; use it as a context, and it ends with the test."""

    def __init__(
        self,
        runs_dir: Path,
        *arguments: str,
        overrides: tuple[str, ...] = (),
        command: list[str] | None = None,
        env: dict[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        self.run = runs_dir / "run"
        self._command = command or train_command(runs_dir, *arguments, overrides=overrides)
        self._env, self._cwd = {**os.environ, **(env or {})}, cwd
        self._seen: set[int] = set()

    def __enter__(self) -> Job:
        self.process = subprocess.Popen(
            self._command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self._env,
            cwd=self._cwd,
        )
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.communicate()

    def hurry(self) -> None:
        """Enough was done to a job that waits a little after each step: it need not any more."""
        (self.run.parent / "hurry").touch()

    def workers(self) -> dict[str, int]:
        """The workers that live, by name; zombies are dead."""
        found = {}
        for nursery in _children(self.process.pid):
            for pid in _children(nursery):
                state, name = _look_at(pid)
                if name.startswith("lockstep ") and state not in ("Z", "X", ""):
                    found[name.removeprefix("lockstep ")] = pid
        self._seen |= set(found.values())
        return found

    def nurseries(self) -> list[int]:
        """Children of the launcher: the process that forks the workers, once it is there."""
        return _children(self.process.pid)

    def nursery(self) -> int:
        """The process that forks the workers."""
        return _children(self.process.pid)[0]

    def steps(self) -> int:
        """How many steps were committed and written down."""
        try:
            return max((row["step"] for row in rows(self.run, "step")), default=0)
        except (OSError, ValueError):
            return 0

    def wait_for(self, condition: Callable[[], Any], what: str = "it") -> Any:
        """Until a condition holds; the job must live on meanwhile."""
        end = time.monotonic() + PATIENCE_S
        while not (found := condition()):
            assert self.process.poll() is None, f"the job ended: {self.process.communicate()}"
            assert time.monotonic() < end, f"waited too long for {what}"
            time.sleep(0.01)
        return found

    def wait_for_steps(self, count: int) -> None:
        """Until so many steps are committed."""
        self.wait_for(lambda: self.steps() >= count, f"{count} steps")

    def wait_for_workers(self, *names: str) -> dict[str, int]:
        """Until these workers, among others, live."""
        return self.wait_for(lambda: (w := self.workers()) and set(names) <= set(w) and w, f"workers {names}")

    def kill(self, *names: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to workers, all at once."""
        pids = self.workers()
        for name in names:
            os.kill(pids[name], number)

    def generations(self) -> list[dict[str, Any]]:
        """The changes of workers so far."""
        try:
            return [row for row in rows(self.run, "generation") if row["changes"]]
        except (OSError, ValueError):
            return []

    def finish(self, code: int = 0) -> tuple[str, str]:
        """To the end; nothing may be left behind. Gives what it printed."""
        self.workers()
        output, errors = self.process.communicate(timeout=PATIENCE_S)
        assert self.process.returncode == code, (self.process.returncode, output, errors)
        self.assert_no_orphan()
        return output, errors

    def assert_no_orphan(self) -> None:
        """No worker that was ever seen lives."""
        end = time.monotonic() + 5
        while left := [pid for pid in self._seen if _look_at(pid)[0] not in ("", "Z", "X")]:
            assert time.monotonic() < end, f"left running: {left}"
            time.sleep(0.02)

    def hashes(self) -> dict[str, Any]:
        """What must be the same whatever happened."""
        found = summary(self.run)
        keys = (
            "weights_sha256",
            "optimizer_sha256",
            "loss",
            "accuracy",
            "best_accuracy",
            "best_step",
            "steps",
        )
        return {key: found[key] for key in keys}


def faulty_job(folder: Path, keys: tuple[str, ...], inside: tuple[str, ...] = (), **variables: str) -> Job:
    """A job of the script tests/elastic/faulty.py, which the variables tell what to suffer."""
    given = {"FAULTS": "[]", "FAULT_DIR": "", "KEYS": json.dumps([*OVERRIDES, *keys]), **variables}
    script = str(Path(__file__).parent / "elastic" / "faulty.py")
    command = [*inside, sys.executable, "-W", "error", script]
    return Job(folder, command=command, env={**given, "RUNS_DIR": str(folder)})


def assert_no_step_lost(run: Path) -> None:
    """Every step and every epoch stands in the metrics exactly once, in order."""
    kinds: dict[str, list[int]] = {"step": [], "epoch": []}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row["kind"] in kinds:
            kinds[row["kind"]].append(row["step" if row["kind"] == "step" else "epoch"])
    assert kinds["step"] == list(range(1, summary(run)["steps"] + 1)), kinds["step"]
    assert kinds["epoch"] == list(range(summary(run)["epochs"]))


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _look_at(pid: int) -> tuple[str, str]:
    """State and name of a process; empty if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "", ""
    return text.rpartition(")")[2].split()[0], text.partition("(")[2].rpartition(")")[0]
