"""The signals of a worker: SIGINT and SIGTERM ask it to stop at the next step boundary."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

_ONE_WISH_S = 1.0
_HEARD = "lockstep: {}: saving after this step; once more ends the run at once, without saving\n"


class Interrupt:
    """In its context the first signal is only noted; a second one, a while later, ends the run at once.

    A launcher may forward a signal that the terminal sent to the worker, too, so two within a second are one.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.is_over = False  # whether a second one has ended the run
        self.answers = False  # whether to confirm a signal on stderr: only worker 0 does
        self._noted_at = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupt:
        try:
            self._before = {
                number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)
            }
        except ValueError:  # not the main thread, which alone can handle signals
            self._before = {}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.signal and now > self._noted_at + _ONE_WISH_S:
            self.is_over = True
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
        if not self.signal:
            self.signal, self._noted_at = signal.Signals(number), now
            if self.answers:
                self._answer()

    def _answer(self) -> None:
        """Confirm the signal on stderr, unless that fails or would block: saving the state matters more."""
        assert self.signal
        below = "\n" if os.isatty(1) else ""  # of a progress bar
        with suppress(OSError):
            if sys.stderr and select.select([], [2], [], 0)[1]:  # never wait for a reader
                os.write(2, f"{below}{_HEARD.format(self.signal.name)}".encode())
