"""Real processes that start at once: forked by a server that has imported torch already.

They take the command lines that a shell would. What only a start from nothing can show (what is imported,
flags of the interpreter, its orderly exit) needs a process of `small.call`.

A launcher of ours starts the process that forks its workers as a new Python, which imports torch. One that
is forked here has a child already that waits to become that process: see `_standby`.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from patience import PATIENCE_S
from preloaded import IMPORTED, SERVER, start_server


class Forked:
    """`python -W error -m lockstep …`, `python -c code …` or `python script …`, as a process of its own."""

    def __init__(
        self,
        command: list[str],
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        terminal: str | None = None,
        errors: str | None = None,
        launches: bool = False,
        draws: bool = False,
    ) -> None:
        """`terminal` takes what it prints, `errors` what it says on stderr; it `launches` workers or not.

        It `draws` its pictures or not: that takes longer than a small run, and is the same for all of them.
        """
        self._command, self._said = command, ["", ""]
        pipes = [SERVER.Pipe(duplex=False) for _ in self._said]
        outputs = [terminal or pipes[0][1], errors or terminal or pipes[1][1]]
        given = (command, dict(env or os.environ), str(cwd or Path.cwd()), outputs, launches, draws)
        self._process = SERVER.Process(target=_become, args=given, daemon=True)
        start_server()
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

    @property
    def returncode(self) -> int | None:
        """As subprocess has it."""
        return self._process.exitcode

    def kill(self) -> None:
        """End it with SIGKILL."""
        self._process.kill()

    def send_signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        if self.pid and self.poll() is None:
            os.kill(self.pid, number)

    def wait(self, timeout: float = PATIENCE_S) -> int:
        """Until it has ended; gives its exit code."""
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired(self._command, timeout)
        return code

    def communicate(self, timeout: float = PATIENCE_S) -> tuple[str, str]:
        """Until it has ended; gives what it printed and said on stderr."""
        done = self.finish(timeout)
        return done.stdout, done.stderr

    def finish(self, timeout_s: float = PATIENCE_S) -> subprocess.CompletedProcess[str]:
        """Wait for its end; gives what subprocess.run does."""
        code = self.wait(timeout_s)
        for thread in self._readers:
            thread.join()
        return subprocess.CompletedProcess(self._command, code, *self._said)

    def _read(self, index: int, reader: Connection) -> None:
        with reader, open(reader.fileno(), closefd=False) as stream:
            self._said[index] = stream.read()


def call(
    command: list[str],
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    launches: bool = False,
    draws: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end and keep what it printed."""
    with Forked(command, env, cwd, launches=launches, draws=draws) as process:
        return process.finish()


def _become(
    command: list[str],
    env: dict[str, str],
    cwd: str,
    outputs: list[str | Connection],
    launches: bool,
    draws: bool,
) -> None:
    """In the new process: take the environment, the folder, the streams, and run the command line."""
    import torch

    from lockstep.cli import listeners

    assert set(IMPORTED) <= set(sys.modules), "the server could not import what processes share"
    words = command[1:]
    _end_without_unregistering()
    gc.freeze()  # else each collection goes through all that the server has imported
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background ignores it
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
        warnings.filterwarnings("ignore", "The `srun` command is available")  # Lightning's, beside a Slurm
        words = words[2:]
    if "OMP_NUM_THREADS" in env:
        torch.set_num_threads(int(env["OMP_NUM_THREADS"]))  # the server has read its own
    if not draws:
        listeners.draw_curves = listeners.draw_timeline = listeners.draw_layers = lambda directory: None
    if launches:
        _standby(command, cwd)
    kind, *rest = words
    sys.argv = words if kind[0] != "-" else ["-c", *rest[1:]]
    if kind == "-m":
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        exec(rest[0], {"__name__": "__main__"})
    else:
        runpy.run_path(kind, run_name="__main__")


def _end_without_unregistering() -> None:
    """Keep torch from taking each of its operators out of its tables when the process ends."""
    for finalizer in list(weakref.finalize._registry):
        if finalizer.peek()[1].__name__ == "_del_library":
            finalizer.detach()


def _standby(command: list[str], cwd: str) -> None:
    """In a process that will launch workers: have a child that becomes the process which forks them.

    It is a child of the launcher, as that is, and no line of the command has run in it; what is saved is one
    more import of torch.
    """
    from lockstep.elastic import fork_server, worker_command
    from lockstep.elastic import worker_process as process

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    child = os.fork()
    if not child:
        ours.close()
        data, fds, _, _ = socket.recv_fds(theirs, 1 << 20, 1)
        theirs.close()
        if data:
            os.setsid()
            arguments = json.loads(data)
            sys.argv, sys.path[:] = ["-c", str(fds[0]), *arguments[1:]], arguments[3:]
            try:
                fork_server.serve()
            finally:
                atexit._run_exitfuncs()  # multiprocessing would leave them out
        raise SystemExit
    theirs.close()
    sys.orig_argv = command

    def start(python: list[str], *, pass_fds: tuple[int], **options: Any) -> _ForkServer:
        code = python.index("-c")
        assert python[1:code] == worker_command.own_command().flags
        assert python[code + 1] == process._FORK_SERVER
        assert options == {"cwd": Path(cwd), "stdin": subprocess.DEVNULL, "start_new_session": True}
        socket.send_fds(ours, [json.dumps(python[code + 2 :]).encode()], pass_fds)
        return _ForkServer(child)

    process.STARTED_IN = worker_command.STARTED_IN = Path(cwd)
    process.subprocess = SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL)


class _ForkServer:
    """As much of a Popen as a launcher uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        os.waitpid(self.pid, 0)
