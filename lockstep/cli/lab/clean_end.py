"""A bench that is ended by a signal ends what it started, too, and removes its temporary folder."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def end_cleanly() -> Iterator[None]:
    """SIGTERM, and SIGHUP of a terminal that closes, become an exception, as Ctrl-C is one."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler is signal.SIG_DFL:  # else it is ignored, as by nohup
            signal.signal(number, _end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)
