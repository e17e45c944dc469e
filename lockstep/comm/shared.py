"""Memory that the workers of one host share, so that a gradient need not pass through sockets there.

Each worker makes a piece of anonymous memory; the others map it through /proc. It has no name on any disk
and ends with the processes. Where a piece cannot be mapped, all workers go without.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
from contextlib import suppress

import torch
from torch import Tensor

from lockstep.comm.group import Group

_HEADER = 64  # bytes at the start of a piece that prove whose it is, and keep what follows aligned


def share(group: Group, num_bytes: int) -> list[Tensor] | None:
    """One tensor of bytes a worker, all of which every worker sees; None where that cannot be."""
    if not (group.on_one_host and group.size > 1 and hasattr(os, "memfd_create")):
        return None
    token = secrets.token_bytes(_HEADER)
    descriptor = _make(token, num_bytes)
    offer = {"path": f"/proc/{os.getpid()}/fd/{descriptor}", "token": token.hex(), "made": descriptor >= 0}
    offers = [json.loads(text) for text in group.all_gather_bytes(json.dumps(offer).encode())]
    pieces = [_open(theirs, num_bytes) for theirs in offers]
    everyone = group.all_gather_bytes(b"no" if None in pieces else b"yes")
    if descriptor >= 0:
        os.close(descriptor)
    if b"no" in everyone:
        return None
    return [piece for piece in pieces if piece is not None]


def _make(token: bytes, num_bytes: int) -> int:
    """A piece of memory of our own, all of it really there; −1 if there is too little."""
    descriptor = os.memfd_create("lockstep")
    try:
        os.posix_fallocate(descriptor, 0, _HEADER + num_bytes)
        os.pwrite(descriptor, token, 0)
    except OSError:
        os.close(descriptor)
        return -1
    return descriptor


def _open(offer: dict[str, object], num_bytes: int) -> Tensor | None:
    """A worker's piece, mapped; None unless it holds the token that this worker told."""
    if not offer["made"]:
        return None
    with suppress(OSError):
        descriptor = os.open(str(offer["path"]), os.O_RDWR)
        try:
            if os.pread(descriptor, _HEADER, 0).hex() == offer["token"]:
                memory = mmap.mmap(descriptor, _HEADER + num_bytes)
                return torch.frombuffer(memory, dtype=torch.uint8, offset=_HEADER)
        finally:
            os.close(descriptor)
    return None
