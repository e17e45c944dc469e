"""Real processes that start at once: forked by a server that has imported torch already.

They take the command lines that a shell would. What only a start from nothing can show (what is imported,
workers that are copies of their command, an orderly exit of the interpreter) needs a process of `small.call`.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import threading
import warnings
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["lockstep.cli.session", "matplotlib.backends.backend_agg"])


class Forked:
    """`python -W error -m lockstep …`, `python -c code …` or `python script …`, as a process of its own."""

    def __init__(
        self,
        command: list[str],
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        terminal: str | None = None,
    ) -> None:
        self._command, self._said = command, ["", ""]
        pipes = [SERVER.Pipe(duplex=False) for _ in self._said]
        outputs = [terminal or writer for _, writer in pipes]
        given = (command[1:], dict(env or os.environ), str(cwd or Path.cwd()), outputs)
        self._process = SERVER.Process(target=_become, args=given, daemon=True)
        self._process.start()
        self.pid = self._process.pid
        self._readers = [
            threading.Thread(target=self._read, args=(index, reader), daemon=True)
            for index, (reader, _) in enumerate(pipes)
        ]
        for (_, writer), thread in zip(pipes, self._readers, strict=True):
            writer.close()  # the process has it now
            thread.start()

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.join()

    def poll(self) -> int | None:
        """The exit code, once there is one."""
        return self._process.exitcode

    def kill(self) -> None:
        """End it with SIGKILL."""
        self._process.kill()

    def finish(self, timeout_s: float = 55.0) -> subprocess.CompletedProcess[str]:
        """Wait for its end; gives what subprocess.run does."""
        self._process.join(timeout_s)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired(self._command, timeout_s)
        for thread in self._readers:
            thread.join()
        return subprocess.CompletedProcess(self._command, code, *self._said)

    def _read(self, index: int, reader: Connection) -> None:
        with reader, open(reader.fileno(), closefd=False) as stream:
            self._said[index] = stream.read()


def call(
    command: list[str], env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end and keep what it printed."""
    with Forked(command, env, cwd) as process:
        return process.finish()


def _become(words: list[str], env: dict[str, str], cwd: str, outputs: list[str | Connection]) -> None:
    """In the new process: take the environment, the folder, the streams, and run the command line."""
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    for number, output in enumerate(outputs, 1):
        fd = os.open(output, os.O_WRONLY | os.O_NOCTTY) if isinstance(output, str) else output.fileno()
        os.dup2(fd, number)
    outputs.clear()
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    if words[:2] == ["-W", "error"]:
        warnings.simplefilter("error")
        words = words[2:]
    kind, *rest = words
    sys.argv = words if kind[0] != "-" else ["-c", *rest[1:]]
    if kind == "-m":
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        exec(rest[0], {"__name__": "__main__"})
    else:
        runpy.run_path(kind, run_name="__main__")
