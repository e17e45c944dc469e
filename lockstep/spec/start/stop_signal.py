"""The signals that ask a run to save and stop; by one of them a batch system warns a job before its end."""

from __future__ import annotations

import signal
import threading
from types import FrameType

WARNING = signal.SIGUSR1  # as `sbatch --signal=USR1@120` sends it
STOPPING = (signal.SIGINT, signal.SIGTERM, WARNING)


def is_free() -> bool:
    """Whether nothing of the user's answers a warning, which would end this process then."""
    return signal.getsignal(WARNING) in (signal.SIG_DFL, _put_back)


def hold_warning() -> None:
    """Keep a warning that comes before the training answers it; what this process starts keeps it, too."""
    if is_free() and threading.current_thread() is threading.main_thread():
        signal.pthread_sigmask(signal.SIG_BLOCK, {WARNING})
        signal.signal(WARNING, _put_back)


def _put_back(number: int, frame: FrameType | None) -> None:
    """Give a warning that another thread took to the main thread, which holds it until it is answered."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {WARNING})
    signal.pthread_kill(threading.main_thread().ident or 0, number)
