"""Allocates memory that the workers of one host share, with a barrier; `exchange.py` copies and sums.

Each worker creates a piece of anonymous memory, and the others map it through /proc. It has no name on any
disk, and it is freed when the processes end. If one worker cannot map a piece, no worker uses shared memory.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import platform
import secrets
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from lockstep.comm.group import Group
from lockstep.errors import GroupLost

_TOKEN = 56  # bytes at the start of a piece that prove its owner; its turn count and farewell flag follow
_HEADER = 64
# Numbers of system calls; membarrier is for processors on which other cores may see writes in another order.
_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine()) if sys.platform == "linux" else None
_MEMBARRIER = {"aarch64": 283}.get(platform.machine())
_WAIT, _WAKE = 0, 1
_FENCE, _REGISTER = 2, 4  # commands of membarrier: a fence among all processes that have registered
_LOOK_AGAIN_S = 0.2  # while waiting, the time between two checks that the others still live
_LOOKS = 9000  # checks until a worker gives up: half an hour, as for a collective


class Shared:
    """One piece of memory for each worker, mapped by all, and a barrier of one system call per worker."""

    def __init__(self, group: Group, pieces: list[mmap.mmap], processes: list[int]) -> None:
        self._group, self._processes, self._turn, self._is_cut = group, processes, 0, False
        self._turns = [ctypes.c_uint32.from_buffer(piece, _TOKEN) for piece in pieces]
        self._farewells = [ctypes.c_uint32.from_buffer(piece, _TOKEN + 4) for piece in pieces]
        self.pieces = [torch.frombuffer(piece, dtype=torch.uint8, offset=_HEADER) for piece in pieces]

    def barrier(self) -> None:
        """Wait until every worker is here: each counts its own turns, and waits for the others' counts."""
        self._turn += 1
        mine = self._turns[self._group.rank]
        _membarrier(_FENCE)  # a worker that sees the new turn sees all earlier writes too
        mine.value = self._turn % 2**32
        _futex(mine, _WAKE, 2**31 - 1)
        for rank, turn in enumerate(self._turns):
            looks = 0
            while (seen := turn.value) != mine.value and (seen - mine.value) % 2**32 >= 2**31:
                gone = self._farewells[rank].value or looks > _LOOKS or (looks and not self._lives(rank))
                if gone or self._is_cut:
                    raise GroupLost(
                        f"worker {self._group.rank} of {self._group.size} lost worker {rank}, which ended "
                        "or hangs: see its output, then run the same command with --resume auto"
                    )
                looks += not _futex(turn, _WAIT, seen, _LOOK_AGAIN_S)

    def leave(self) -> None:
        """Tell the workers that wait for this one that it will not come."""
        self._farewells[self._group.rank].value = 1
        _futex(self._turns[self._group.rank], _WAKE, 2**31 - 1)

    def cut(self) -> None:
        """Make this worker's barriers fail from now on, also one it waits in; called from another thread."""
        self._is_cut = True
        for turn in self._turns:
            _futex(turn, _WAKE, 2**31 - 1)

    def close(self) -> None:
        """Be told of no loss any more; the memory is free when no tensor of it is left."""
        self._group.on_abort.remove(self.leave)
        self._group.on_cut.remove(self.cut)

    def _lives(self, rank: int) -> bool:
        """Whether a worker's process exists and is not a zombie."""
        try:
            stat = Path(f"/proc/{self._processes[rank]}/stat").read_text(encoding="ascii", errors="replace")
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] not in "ZX"


def share(group: Group, num_bytes: int) -> Shared | None:
    """Shared memory with `num_bytes` for each worker; None if that is not possible."""
    if not (group.on_one_host and group.size > 1 and _FUTEX):
        return None
    token = secrets.token_bytes(_TOKEN)
    descriptor = _make(token, num_bytes) if _membarrier(_REGISTER) else -1
    offer = {"process": os.getpid(), "descriptor": descriptor, "token": token.hex()}
    offers = [json.loads(text) for text in group.all_gather_bytes(json.dumps(offer).encode())]
    pieces = [_open(theirs, num_bytes) for theirs in offers]
    everyone = group.all_gather_bytes(b"no" if None in pieces else b"yes")
    if descriptor >= 0:
        os.close(descriptor)
    if b"no" in everyone:
        return None
    mapped = [piece for piece in pieces if piece is not None]
    memory = Shared(group, mapped, [theirs["process"] for theirs in offers])
    group.on_abort.append(memory.leave)
    group.on_cut.append(memory.cut)
    return memory


def _make(token: bytes, num_bytes: int) -> int:
    """The descriptor of a new piece of memory, fully allocated; −1 if there is too little memory."""
    descriptor = -1
    try:
        descriptor = os.memfd_create("lockstep")
        os.posix_fallocate(descriptor, 0, _HEADER + num_bytes)
        os.pwrite(descriptor, token, 0)
    except OSError:
        if descriptor >= 0:
            os.close(descriptor)
        return -1
    return descriptor


def _open(offer: dict[str, Any], num_bytes: int) -> mmap.mmap | None:
    """Map the piece that a worker offers; None unless it holds the token in the offer."""
    with suppress(OSError, ValueError):
        descriptor = os.open(f"/proc/{offer['process']}/fd/{offer['descriptor']}", os.O_RDWR)
        try:
            if os.pread(descriptor, _TOKEN, 0).hex() == offer["token"]:
                return mmap.mmap(descriptor, _HEADER + num_bytes)
        finally:
            os.close(descriptor)
    return None


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _futex(word: ctypes.c_uint32, operation: int, value: int, timeout_s: float = 0.0) -> bool:
    """futex(2): sleep while the word has this value, or wake the sleepers; False if the time ran out."""
    timeout = ctypes.byref(_Time(0, int(timeout_s * 1e9))) if timeout_s else None
    assert _FUTEX is not None
    answer = _LIBC.syscall(_FUTEX, ctypes.byref(word), operation, ctypes.c_uint32(value), timeout, None, 0)
    return not (answer == -1 and ctypes.get_errno() == _TIMED_OUT)


def _membarrier(command: int) -> bool:
    """membarrier(2), if the processor needs it; False if the kernel does not have it."""
    return _MEMBARRIER is None or _LIBC.syscall(_MEMBARRIER, command, 0, 0) == 0


_TIMED_OUT = 110
_LIBC = ctypes.CDLL(None, use_errno=True)
