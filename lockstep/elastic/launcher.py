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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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
_LAST_WORDS = "lockstep: stopped by"


class Launcher:
    """Starts `size` workers and waits for them; `advice` is for when one was killed."""

    def __init__(
        self, size: int, show: Callable[[int, str], None], advice: str = "; --resume auto goes on"
    ) -> None:
        self._size, self._show, self._advice = size, show, advice
        self._workers: list[subprocess.Popen[str]] = []
        self._readers: list[threading.Thread] = []
        self._wishes: list[signal.Signals] = []  # signals that we were sent
        self._heard = False  # whether worker 0 said how it stopped

    def run(self) -> int:
        """Start the workers, wait for all, and give the exit code of the first that failed."""
        command = _own_command()
        with socket.socket() as listener, self._listening():
            listener.bind((_ADDRESS, 0))
            listener.listen(1024)
            try:
                for rank in range(self._size):
                    if not self._wishes:
                        self._start(command, rank, listener)
                return self._wait()
            except BaseException:
                self._signal_all(signal.SIGKILL)
                raise

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """Inside, our signals are handed on; off the main thread they go to whoever owns that one."""
        before = {}
        if threading.current_thread() is threading.main_thread():
            before = {n: signal.signal(n, self._hand_on) for n in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _start(self, command: list[str], rank: int, listener: socket.socket) -> None:
        """Worker 0 speaks on our own stdout; the others have nothing to say but errors."""
        fd = listener.fileno()
        port = listener.getsockname()[1]
        world = World(
            "lockstep",
            rank,
            self._size,
            rank,
            self._size,
            _ADDRESS,
            port,
            None if rank else fd,
            parent=os.getpid(),
        )
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
        """Show what a worker says; once it is to stop, only how it did."""
        with stream:
            for line in stream:
                self._heard = self._heard or line.startswith(_LAST_WORDS)
                if not self._wishes or line.startswith(_LAST_WORDS):
                    with suppress(OSError):  # nobody reads us; the worker must not wait for that
                        self._show(rank, line.rstrip("\n"))

    def _wait(self) -> int:
        """Until all have ended; once one fails, or at a second signal, the others are ended too."""
        first: tuple[int, int] | None = None
        asked, end = 0.0, float("inf")
        while any(worker.poll() is None for worker in self._workers):
            first = first or self._find_failed()
            now = time.monotonic()
            if (first or len(self._wishes) > 1) and now > asked + _ASK_EVERY_S:
                over = now > end or len(self._wishes) > 2
                self._signal_all(signal.SIGKILL if over else signal.SIGTERM)
                asked, end = now, min(end, now + _GRACE_S)
            time.sleep(_POLL_S)
        for reader in self._readers:
            reader.join(timeout=1.0)
        return self._judge(first or self._find_failed())

    def _judge(self, failed: tuple[int, int] | None) -> int:
        """The exit code; a worker that was killed cannot say so, so we do."""
        rank, code = failed or (0, 0)
        if self._wishes and (code or len(self._workers) < self._size):
            wish = self._wishes[0]
            if not self._heard:
                self._show(0, f"lockstep: stopped by {wish.name} before the step under way was done")
            return 128 + wish
        if code < 0:
            self._show(0, f"lockstep: worker {rank} was ended by {_name(-code)}{self._advice}")
        return 1 if code < 0 else code

    def _find_failed(self) -> tuple[int, int] | None:
        """A worker that has failed and its exit code; one that was killed comes first: it is the cause."""
        codes = [(rank, worker.poll()) for rank, worker in enumerate(self._workers)]
        failed = [(rank, code) for rank, code in codes if code]
        return min(failed, key=lambda item: (item[1] > 0, item[0]), default=None)

    def _hand_on(self, number: int, frame: FrameType | None) -> None:
        self._wishes.append(signal.Signals(number))
        if len(self._wishes) == 1:
            self._signal_all(signal.Signals(number))

    def _signal_all(self, number: signal.Signals) -> None:
        for worker in self._workers:
            if worker.poll() is None:
                worker.send_signal(number)


def die_with_launcher(world: World) -> None:
    """Let the kernel end this worker when its launcher ends, however that happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != world.parent:  # it has ended already
        raise LockstepError("the launcher of this worker has ended")


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _own_command() -> list[str]:
    """The command that started this process, to start it again."""
    arguments = sys.orig_argv[1:]
    script = sys.argv[0]
    if not arguments or script in ("", "-c") or not Path(script).is_file():
        raise SpecError("several workers run copies of a script, and this is none: save the code in a file")
    return [sys.executable, *arguments]
