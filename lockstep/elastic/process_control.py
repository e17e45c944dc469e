"""Linux calls about processes: end with the parent, name a process, see whether one is stopped."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


def end_with_parent(parent: int) -> None:
    """Let the kernel end this process when its parent ends; now, if it has ended already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def name_process(name: str) -> None:
    """The name of this process in `ps` and `top`; 15 letters of it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()))


def is_stopped(pid: int) -> bool:
    """Whether a process was frozen by a signal; one that a debugger halts (t) has somebody to wake it."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:  # noqa: PTH123  (looked at all the time)
            stat = file.read(1024)
    except OSError:
        return False
    return stat.rpartition(b")")[2][1:2] == b"T"
