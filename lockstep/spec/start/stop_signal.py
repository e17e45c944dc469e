"""The signals that ask a run to save and stop; by one of them a batch system warns a job before its end."""

from __future__ import annotations

import signal

WARNING = signal.SIGUSR1  # as `sbatch --signal=USR1@120` sends it
STOPPING = (signal.SIGINT, signal.SIGTERM, WARNING)


def is_free() -> bool:
    """Whether a warning would end this process, since nothing of the user's answers it."""
    return signal.getsignal(WARNING) is signal.SIG_DFL


def hold_warning() -> None:
    """Keep a warning that comes before the training answers it; what this process starts keeps it, too."""
    if is_free():
        signal.pthread_sigmask(signal.SIG_BLOCK, {WARNING})
