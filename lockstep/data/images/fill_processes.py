"""Processes that fill shared memory once: many small images, whose threads would wait for the lock of Python.

They are forked and end when their part is done, or when the process that wants it is gone. They call nothing
of torch, whose threads a fork does not have.
"""

from __future__ import annotations

import mmap
import os
import signal
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lockstep.errors import DataError

_PAUSE = 64  # items after which a process looks whether it is still wanted


def shared_empty(shape: Sequence[int]) -> Tensor:
    """A uint8 tensor in memory that forked processes write to."""
    size = torch.Size(shape)
    return torch.frombuffer(mmap.mmap(-1, max(size.numel(), 1)), dtype=torch.uint8)[: size.numel()].view(size)


def fill_in_processes(fill: Callable[[int], None], items: Sequence[int], count: int) -> None:
    """Call `fill` with every item, by `count` processes; a DataError of one is raised here."""
    ends = [_start(fill, items[number::count]) for number in range(count)]
    faults = [_finish(*end) for end in ends]
    for fault in filter(None, faults):
        raise DataError(fault)


def _start(fill: Callable[[int], None], items: Sequence[int]) -> tuple[int, int]:
    """Fork a process; returns its number and the pipe by which it tells of an error."""
    read, write, parent = *os.pipe(), os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about threads; the child starts none
        pid = os.fork()
    if pid:
        os.close(write)
        return pid, read
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's matter
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for place, item in enumerate(items):
            if place % _PAUSE == 0 and os.getppid() != parent:
                break
            fill(item)
    except BaseException as error:
        os.write(write, (str(error) or repr(error)).encode()[: 1 << 15])
    finally:
        os._exit(0)


def _finish(pid: int, read: int) -> str:
    """Wait for a process; returns its error."""
    with os.fdopen(read, "rb") as pipe:
        told = pipe.read().decode(errors="replace")
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    ended = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return told or (f"a process that decodes images ended: {ended}" if code else "")
