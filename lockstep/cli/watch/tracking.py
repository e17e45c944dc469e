"""`lockstep train --track wandb|mlflow`: has a process beside training follow the run; never waits for it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from lockstep.errors import Interrupted, Paused
from lockstep.runs.event import Event, Finished, Listener, Notice, Started
from lockstep.spec.identity import flatten
from lockstep.spec.run_file import to_table
from lockstep.train.interrupt import Interrupt

_MODULE = "lockstep.cli.watch.tracking_process"
_LOG = "log.txt"
_MOST_BYTES = 65536
_PATIENCE_S = {"finished": 30, "failed": 30, "stopped": 15}  # for the last rows; a machine may soon be taken
_FROZEN_S = 60


class Tracking:
    """An event listener that starts a process for each tracker, and tells them how the run ended."""

    def __init__(self, names: Sequence[str], tell: Listener) -> None:
        self._processes = [_TrackingProcess(name, tell) for name in names]
        self._summary: dict[str, Any] | None = None

    def __enter__(self) -> Tracking:
        return self

    def __call__(self, event: Event) -> None:
        if isinstance(event, Finished):
            self._summary = event.summary
        for process in self._processes:
            if isinstance(event, Started):
                process.start(event)
            process.pass_on()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asked = isinstance(error, Interrupted | Paused | SystemExit | KeyboardInterrupt)
        state = "stopped" if asked else "finished" if self._summary and not error else "failed"
        summary = {k: v for k, v in (self._summary or {}).items() if isinstance(v, str | int | float)}
        with Interrupt():  # a signal that is sent twice must not interrupt the last rows
            for process in self._processes:
                process.end(state, summary)
            for process in self._processes:
                process.wait()


class _TrackingProcess:
    """The process of one tracker, and what it says; nothing here waits but `wait`, after training."""

    def __init__(self, name: str, tell: Listener) -> None:
        self._name, self._tell = name, tell
        self._process: subprocess.Popen[bytes] | None = None
        self._log: Path | None = None
        self._failed = False

    def start(self, event: Started) -> None:
        """Start it, unless it follows the run already."""
        if self._process or self._failed:
            return
        self._log = event.directory / self._name / _LOG
        try:
            self._log.parent.mkdir(exist_ok=True)
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", _MODULE, self._name],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    start_new_session=True,  # Ctrl-C is for training, which then says how it ended
                )
        except OSError as error:  # such as a full disk
            self._say(f"not started: {error.strerror or error}", failed=True)
            return
        assert self._process.stdout
        os.set_blocking(self._process.stdout.fileno(), False)
        self._write(folder=str(self._log.parent.resolve()), name=event.directory.name, settings=_about(event))

    def end(self, state: str, summary: dict[str, Any]) -> None:
        """Tell it how the run ended."""
        self._write(state=state, summary=summary, patience_s=_PATIENCE_S[state])

    def wait(self) -> None:
        """Until it has handed over the last rows, or has given up."""
        if not self._process:
            return
        assert self._process.stdin
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_FROZEN_S)  # it gives up earlier, unless it is frozen
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        while self._process.stdout and not self._process.stdout.closed:
            self.pass_on()

    def pass_on(self) -> None:
        """Tell the user what it says."""
        process = self._process
        if not process or not process.stdout or process.stdout.closed:
            return
        with suppress(BlockingIOError):
            said = os.read(process.stdout.fileno(), _MOST_BYTES)
            for line in said.splitlines():
                self._say(**json.loads(line))
            if not said and (code := process.poll()) is not None:
                process.stdout.close()
                if code and not self._failed:
                    late = code == -signal.SIGALRM
                    self._say("did not take the last rows in time" if late else f"ended by code {code}", True)

    def _write(self, **words: Any) -> None:
        """A line for it, far smaller than what a pipe holds; it may have ended, which `pass_on` tells."""
        if self._process and self._process.stdin:
            with suppress(OSError):
                self._process.stdin.write(json.dumps(words).encode() + b"\n")
                self._process.stdin.flush()

    def _say(self, text: str, failed: bool = False) -> None:
        self._failed |= failed
        more = f"; no more is tracked, training goes on; see {self._log}" if failed else ""
        self._tell(Notice(f"{self._name}: {text}{more}", warning=failed))


def _about(event: Started) -> dict[str, Any]:
    """The run's settings by key, and what came of them."""
    found = {
        "model": event.model,
        "data": event.data,
        "identity": event.identity,
        "device": event.device,
        "kernels": event.kernels,
        "num_params": event.num_params,
        "num_train": event.num_train,
        "workers": event.num_workers,
    }
    return flatten("", to_table(event.run)) | {f"run.{key}": value for key, value in found.items()}
