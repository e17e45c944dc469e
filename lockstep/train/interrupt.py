"""The signals of a worker: SIGINT, SIGTERM and a batch system's warning ask it to stop after its step."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

from lockstep.comm.group import Group
from lockstep.spec.start.stop_signal import STOPPING, WARNING, is_free

_ONE_WISH_S = 1.0
_HEARD = "lockstep: {}: saving after this step{}\n"
_ONCE_MORE = "; once more ends the run at once, without saving"


class Interrupt:
    """In its context the first signal is only noted; a second one, a while later, ends the run at once.

    A launcher may forward a signal that the terminal sent to the worker, too, so two within a second are one.
    A warning is no wish of a person: it may come often, and a first signal after it changes nothing.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.is_over = False  # whether a second one has ended the run
        self.answers = False  # whether to confirm a signal on stderr: only worker 0 does
        self._wished_at = 0.0  # by a person, or by who ends the job
        self._before: dict[signal.Signals, Any] = {}
        self._held: set[signal.Signals] = set()

    def __enter__(self) -> Interrupt:
        try:
            self._before = {
                number: signal.signal(number, self._note)
                for number in STOPPING
                if number != WARNING or is_free()
            }
            held = signal.pthread_sigmask(signal.SIG_UNBLOCK, self._before.keys() & {WARNING})
            self._held = self._before.keys() & {WARNING} & held
        except ValueError:  # not the main thread, which alone can handle signals
            self._before = {}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, self._held)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def agree(self, group: Group) -> signal.Signals:
        """The signal that some of the workers got, the same on all; a warning before others. A collective."""
        told = group.all_gather_bytes(str(int(self.signal or 0)).encode())
        found = set(map(int, told)) - {0} or {signal.SIGTERM}
        return WARNING if WARNING in found else signal.Signals(min(found))

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if number != WARNING:
            if self._wished_at and now > self._wished_at + _ONE_WISH_S:
                self.is_over = True
                raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
            self._wished_at = self._wished_at or now
        if not self.signal:
            self.signal = signal.Signals(number)
            if self.answers:
                self._answer()

    def _answer(self) -> None:
        """Confirm the signal on stderr, unless that fails or would block: saving the state matters more."""
        assert self.signal
        below = "\n" if os.isatty(1) else ""  # of a progress bar
        with suppress(OSError):
            if sys.stderr and select.select([], [2], [], 0)[1]:  # never wait for a reader
                more = _ONCE_MORE if self.signal != WARNING else ""
                os.write(2, f"{below}{_HEARD.format(self.signal.name, more)}".encode())
