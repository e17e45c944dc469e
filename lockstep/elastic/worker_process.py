"""The processes of a node: asks the fork server for workers, talks to them, shows what they print."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from lockstep.elastic.message import LIMIT_BYTES, Message, unpack
from lockstep.elastic.process_control import is_stopped
from lockstep.elastic.worker_command import WorkerCommand
from lockstep.spec.world import STARTED_IN, VARIABLE

_REPLY_BYTES = 1 << 12
_AGAIN_S = 0.05  # between two tries to send to the fork server
# The fork server gets our sys.path, so that no file in the current directory can shadow a module.
_FORK_SERVER = "import sys; sys.path[:] = sys.argv[4:]; import lockstep.elastic.fork_server as f; f.serve()"


@dataclass
class Worker:
    """A worker of this node."""

    name: str
    slot: int  # its place on the node, which decides its GPU; a replacement gets the same
    started: float
    heard: float = 0.0
    pid: int = 0
    code: int = 0
    ended: bool = False
    why: str = ""  # why the launcher killed it
    beats: bool = False
    stopped_at: float | None = None
    line: asyncio.StreamWriter | None = None
    rank: int | None = None  # its rank at the end of training; None before


class Processes:
    """Starts workers through the fork server, receives their messages and notices how they end."""

    def __init__(
        self,
        hear: Callable[[Worker, Message], None],
        born: Callable[[Worker], None],
        ended: Callable[[Worker], None],
        show: Callable[[str, str], None],
    ) -> None:
        self._hear, self._born, self._ended, self._show = hear, born, ended, show
        self._workers: dict[str, Worker] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self.fork_server_ended = False

    def open(self, command: WorkerCommand, preload: str) -> None:
        """Start the fork server, which imports the module `preload`; its workers run `command`."""
        self._command = command
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            arguments = [str(theirs.fileno()), str(os.getpid()), preload, *sys.path]
            self._fork_server = subprocess.Popen(
                [sys.executable, *command.flags, "-c", _FORK_SERVER, *arguments],
                cwd=STARTED_IN,
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._line.setblocking(False)
        asyncio.get_running_loop().add_reader(self._line, self._read_fork_server)

    def start(self, worker: Worker, world: dict[str, Any], speaks: bool) -> None:
        """Ask the fork server for a worker, which counts as alive from now on."""
        ours, theirs = socket.socketpair()
        reading, writing = os.pipe()
        request = {
            "worker": worker.name,
            "world": {"launcher": "lockstep", **world},
            "variable": VARIABLE,
            "speaks": speaks,
            "argv": self._command.argv,
            "orig_argv": sys.orig_argv,
            "module": self._command.module,
        }
        self._workers[worker.name] = worker
        self._spawn(self._ask(json.dumps(request).encode(), theirs, writing))
        self._spawn(self._attend(worker, ours))
        self._spawn(self._show_errors(worker, reading))

    def all(self) -> list[Worker]:
        """All workers that were ever started."""
        return list(self._workers.values())

    def alive(self) -> list[Worker]:
        """Workers that have not ended."""
        return [worker for worker in self._workers.values() if not worker.ended]

    def last_failed(self) -> Worker | None:
        """The last worker that failed; if any were killed, the last of those."""
        failed = [worker for worker in self._workers.values() if worker.code]
        return min(reversed(failed), key=lambda worker: worker.code > 0, default=None)

    def finished(self) -> list[Worker]:
        """Workers that trained to the end, by rank; those that were killed afterwards come last."""
        done = [worker for worker in self._workers.values() if worker.rank is not None]
        return sorted(done, key=lambda worker: (worker.code < 0, worker.rank))

    async def wait(self, seconds: float) -> None:
        """Wait until a worker ends, at most for `seconds`."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), seconds)
        self._changed.clear()
        if self._tasks and not self.alive():  # to show their last output
            await asyncio.wait(self._tasks, timeout=1.0)

    def tell(self, name: str, message: Message) -> None:
        """Send a message to one of our workers."""
        worker = self._workers.get(name)
        if worker and worker.line and not worker.ended and not worker.line.is_closing():
            worker.line.write(json.dumps(message).encode() + b"\n")

    def send_signal(self, worker: Worker, number: signal.Signals) -> None:
        """Send a signal to a worker."""
        if worker.pid and not worker.ended:
            with suppress(ProcessLookupError):
                os.kill(worker.pid, number)

    def signal_all(self, number: signal.Signals, but_rank: int | None = None) -> None:
        """Send a signal to all workers, except one that trained to the end with rank `but_rank`."""
        for worker in self.alive():
            if but_rank is None or worker.rank != but_rank:
                self.send_signal(worker, number)

    def is_fork_server_stopped(self) -> bool:
        return is_stopped(self._fork_server.pid)

    def wake_fork_server(self) -> None:
        self._fork_server.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """Kill the workers and the fork server."""
        self.signal_all(signal.SIGKILL)
        for worker in self._workers.values():
            if worker.line:
                worker.line.close()
        asyncio.get_running_loop().remove_reader(self._line)
        self._line.close()
        self._fork_server.kill()
        self._fork_server.wait()

    def _read_fork_server(self) -> None:
        try:
            data = self._line.recv(_REPLY_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            asyncio.get_running_loop().remove_reader(self._line)
            self.fork_server_ended = True
            for worker in self.alive():
                self._end(worker, -signal.SIGKILL)
            return
        reply = json.loads(data)
        if "worker" in reply:
            worker = self._workers[reply["worker"]]
            worker.pid = reply["pid"]
            self._born(worker)
            return
        for worker in self.alive():
            if worker.pid == reply["pid"]:
                self._end(worker, reply["code"])

    def _end(self, worker: Worker, code: int) -> None:
        worker.ended, worker.code = True, code
        self._ended(worker)
        self._changed.set()

    async def _ask(self, request: bytes, line: socket.socket, errors: int) -> None:
        """Send a request with its descriptors; while the fork server imports torch, they may pile up."""
        try:
            with suppress(OSError):  # if the fork server has ended, `_read_fork_server` notices
                while not self._is_sent(request, [line.fileno(), 1, errors]):
                    await asyncio.sleep(_AGAIN_S)
        finally:
            line.close()
            os.close(errors)

    def _is_sent(self, request: bytes, fds: list[int]) -> bool:
        try:
            socket.send_fds(self._line, [request], fds)
        except BlockingIOError:
            return False
        return True

    async def _attend(self, worker: Worker, line: socket.socket) -> None:
        """Receive a worker's messages until it ends."""
        reader, worker.line = await asyncio.open_connection(sock=line, limit=LIMIT_BYTES)
        with suppress(OSError, ValueError):
            while data := await reader.readline():
                self._hear(worker, unpack(data))
        worker.line.close()

    async def _show_errors(self, worker: Worker, fd: int) -> None:
        """Show a worker's stderr, line by line."""
        reader = asyncio.StreamReader(limit=LIMIT_BYTES)
        with os.fdopen(fd, "rb", 0) as pipe:
            await asyncio.get_running_loop().connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(reader), pipe
            )
            while data := await reader.readline():
                self._show(worker.name, data.decode(errors="replace").rstrip("\n"))

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
