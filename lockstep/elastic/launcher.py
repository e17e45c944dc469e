"""Our own launcher: the workers of one host, as copies of this very command.

It makes the endpoint, starts the workers, hands signals on, shows what a failing worker said, and leaves
none behind. It imports no torch, so that the workers start at once.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import IO

from lockstep.errors import LockstepError, SpecError
from lockstep.spec.world import VARIABLE, World

_ADDRESS = "127.0.0.1"
_POLL_S = 0.05
_ASK_EVERY_S = 0.5  # a worker takes a first SIGTERM for a wish to stop after its step
_GRACE_S = 10.0  # for workers to end by themselves after one has failed, before they are killed
_PR_SET_PDEATHSIG = 1


class Launcher:
    """Starts `size` workers and waits for them; `advice` is for when one was killed."""

    def __init__(
        self, size: int, show: Callable[[int, str], None], advice: str = "; --resume auto goes on"
    ) -> None:
        self._size, self._show, self._advice = size, show, advice
        self._workers: list[subprocess.Popen[str]] = []
        self._readers: list[threading.Thread] = []

    def run(self) -> int:
        """Start the workers, wait for all, and give the exit code of the first that failed."""
        command = _own_command()
        with socket.socket() as listener:
            listener.bind((_ADDRESS, 0))
            listener.listen(1024)
            before = {
                number: signal.signal(number, self._hand_on) for number in (signal.SIGINT, signal.SIGTERM)
            }
            try:
                for rank in range(self._size):
                    self._start(command, rank, listener)
            finally:
                code = self._wait() if len(self._workers) == self._size else self._end_all()
                for number, handler in before.items():
                    signal.signal(number, handler)
        return code

    def _start(self, command: list[str], rank: int, listener: socket.socket) -> None:
        """Worker 0 speaks on our own stdout; the others have nothing to say but errors."""
        fd = listener.fileno()
        port = listener.getsockname()[1]
        world = World("lockstep", rank, self._size, rank, self._size, _ADDRESS, port, None if rank else fd)
        worker = subprocess.Popen(
            command,
            env={**os.environ, VARIABLE: world.dump()},
            stdin=subprocess.DEVNULL,
            stdout=None if rank == 0 else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=() if rank else (fd,),
            start_new_session=True,  # the terminal's signals come to us alone, and we hand each on once
            text=True,
            errors="replace",
        )
        self._workers.append(worker)
        assert worker.stderr is not None
        reader = threading.Thread(target=self._read, args=(rank, worker.stderr), daemon=True)
        reader.start()
        self._readers.append(reader)

    def _read(self, rank: int, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                self._show(rank, line.rstrip("\n"))

    def _wait(self) -> int:
        """Until all have ended; once one fails, the others are ended too."""
        first: tuple[int, int] | None = None
        asked, end = 0.0, float("inf")
        while any(worker.poll() is None for worker in self._workers):
            first = first or self._find_failed()
            now = time.monotonic()
            if first and now > asked + _ASK_EVERY_S:
                self._signal_all(signal.SIGTERM if now < end else signal.SIGKILL)
                asked, end = now, min(end, now + _GRACE_S)
            time.sleep(_POLL_S)
        for reader in self._readers:
            reader.join(timeout=1.0)
        first = first or self._find_failed()
        if not first:
            return 0
        rank, code = first
        if code < 0:
            name = signal.Signals(-code).name
            self._show(rank, f"lockstep: worker {rank} was ended by {name}{self._advice}")
            return 1
        return code

    def _end_all(self) -> int:
        """After a worker could not even be started."""
        self._signal_all(signal.SIGKILL)
        for worker in self._workers:
            worker.wait()
        return 1

    def _find_failed(self) -> tuple[int, int] | None:
        """A worker that has failed and its exit code; one that was killed comes first: it is the cause."""
        codes = [(rank, worker.poll()) for rank, worker in enumerate(self._workers)]
        failed = [(rank, code) for rank, code in codes if code]
        return min(failed, key=lambda item: (item[1] > 0, item[0]), default=None)

    def _hand_on(self, number: int, frame: FrameType | None) -> None:
        self._signal_all(signal.Signals(number))

    def _signal_all(self, number: signal.Signals) -> None:
        for worker in self._workers:
            if worker.poll() is None:
                worker.send_signal(number)


def die_with_launcher(world: World) -> None:
    """Let the kernel end this worker when its launcher ends, however that happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == 1 and world.rank >= 0:  # it has ended already
            raise LockstepError("the launcher of this worker has ended")


def _own_command() -> list[str]:
    """The command that started this process, to start it again."""
    arguments = sys.orig_argv[1:]
    script = sys.argv[0]
    if not arguments or script in ("", "-c") or not Path(script).is_file():
        raise SpecError("several workers run copies of a script, and this is none: save the code in a file")
    return [sys.executable, *arguments]
