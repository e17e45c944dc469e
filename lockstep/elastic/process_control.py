"""Linux system calls on processes, no policy: end with the parent, name, is it stopped, how did it end."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


def end_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent ends; exit now if that has ended already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def name_process(name: str) -> None:
    """Set the name of this process in `ps` and `top`; the kernel keeps 15 characters."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()))


def is_stopped(pid: int) -> bool:
    """Whether a process was stopped by a signal (T); not if a debugger halts it (t), which can wake it."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:  # noqa: PTH123  (looked at all the time)
            stat = file.read(1024)
    except OSError:
        return False
    return stat.rpartition(b")")[2][1:2] == b"T"


def fate(code: int, why: str) -> str:
    """How a process ended, by its exit code and what is known besides; empty if without an error."""
    if code >= 0:
        return (why or f"failed with exit code {code}") if code else ""
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return why or f"was killed by {name}"
