"""A training job as a real process with real workers, for tests that hurt it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from forked import Forked
from patience import PATIENCE_S
from small import OVERRIDES, rows, summary, train_command

SCRIPTS = Path(__file__).parent / "elastic"
SHOWN = 4000  # characters of what a job has said, if its test fails
GONE_S = 5.0  # after which no worker may live


class Job:
    """`lockstep train` of the small run; use it as a context, and it ends with the test.

    It is forked, which saves most of its start; a `fresh` one is started as a shell would, or `inside` what
    another command makes. One that is `paced` takes its time for each step, until it should `hurry`. A
    `script` takes the place of `-m lockstep`. One that is forked draws no pictures unless it `draws`.
    """

    def __init__(
        self,
        runs_dir: Path,
        *arguments: str,
        overrides: tuple[str, ...] = (),
        command: list[str] | None = None,
        env: dict[str, str] | None = None,
        cwd: Path | None = None,
        fresh: bool = False,
        inside: tuple[str, ...] = (),
        paced: bool = False,
        script: Path | None = None,
        draws: bool = False,
    ) -> None:
        self.run = runs_dir / "run"
        self._command = command or train_command(runs_dir, *arguments, overrides=overrides)
        if script := SCRIPTS / "paced.py" if paced else script:
            place = self._command.index("-m")
            self._command[place : place + 2] = [str(script)]
        self._command[:0] = inside
        self._env, self._cwd, self._fresh = {**os.environ, **(env or {})}, cwd, fresh or bool(inside)
        self._draws = draws
        self._seen: set[int] = set()

    def __enter__(self) -> Job:
        self._errors = tempfile.NamedTemporaryFile()
        self._hurry = Path(f"{self._errors.name}-hurry")
        self._env["HURRY"] = str(self._hurry)
        self.process: Any
        if self._fresh:
            self.process = subprocess.Popen(
                self._command,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                env=self._env,
                cwd=self._cwd,
            )
        else:
            errors = self._errors.name
            self.process = Forked(
                self._command, self._env, self._cwd, errors=errors, launches=True, draws=self._draws
            )
        return self

    def __exit__(self, *error: object) -> None:
        if error[0]:  # pytest shows it
            lived = f"workers {self.workers()}, step {self.steps()}, {self.generations()}"
            print(f"{self.run}: {lived}\n{self.errors()[-SHOWN:]}")
        self.process.kill()
        with suppress(ValueError):  # a test has closed its output
            self.process.communicate()
        self._errors.close()
        self._hurry.unlink(missing_ok=True)

    def errors(self) -> str:
        """What it has said on stderr so far."""
        return Path(self._errors.name).read_text()

    def hurry(self) -> None:
        """Enough was done to a job that is paced."""
        self._hurry.touch()

    def workers(self) -> dict[str, int]:
        """The workers that live, by name; zombies are dead."""
        found = {}
        for server in _children(self.process.pid):
            for pid in _children(server):
                state, name = _look_at(pid)
                if name.startswith("lockstep ") and state not in ("Z", "X", ""):
                    found[name.removeprefix("lockstep ")] = pid
        self._seen |= set(found.values())
        return found

    def nurseries(self) -> list[int]:
        """Children of the launcher: the process that forks the workers, once it is there."""
        return _children(self.process.pid)

    def fork_server(self) -> int:
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
            assert self.process.poll() is None, f"the job ended: {self.errors()}"
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

    def lose_and_stop(self, name: str) -> None:
        """Kill a worker, and stop the job when the others go on."""
        self.wait_for_workers(name)
        self.kill(name)
        self.wait_for(self.generations, "the next generation")
        self.process.send_signal(signal.SIGTERM)
        self.hurry()
        self.finish(143)

    def generations(self) -> list[dict[str, Any]]:
        """The changes of workers so far."""
        try:
            return [row for row in rows(self.run, "generation") if row["changes"]]
        except (OSError, ValueError):
            return []

    def finish(self, code: int = 0) -> tuple[str, str]:
        """To the end; nothing may be left behind. Gives what it printed."""
        self.workers()
        output, _ = self.process.communicate(timeout=PATIENCE_S)
        errors = self.errors()
        assert self.process.returncode == code, (self.process.returncode, output, errors)
        self.assert_no_orphan()
        return output, errors

    def assert_no_orphan(self) -> None:
        """No worker that was ever seen lives."""
        end = time.monotonic() + GONE_S
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
        return {"feedback_sha256": found.get("feedback_sha256"), **{key: found[key] for key in keys}}


def faulty_job(folder: Path, keys: tuple[str, ...], **variables: str) -> Job:
    """A job of the script tests/elastic/faulty.py, which the variables tell what to suffer."""
    given = {"KEYS": json.dumps([*OVERRIDES, *keys]), **variables}
    command = [sys.executable, "-W", "error", str(SCRIPTS / "faulty.py")]
    return Job(folder, command=command, env={**given, "RUNS_DIR": str(folder)}, draws=True)


def assert_no_step_lost(run: Path) -> None:
    """Every step and every epoch stands in the metrics exactly once, in order; of rounds their last step."""
    steps = [
        step
        for row in rows(run, "step")
        for step in range(row["step"], row["step"] - row.get("steps", 1), -1)
    ]
    assert sorted(steps) == list(range(1, summary(run)["steps"] + 1)), steps
    ends, epochs = [row["step"] for row in rows(run, "step")], [row["epoch"] for row in rows(run, "epoch")]
    assert ends == sorted(ends) and epochs == list(range(summary(run)["epochs"])), (ends, epochs)


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
