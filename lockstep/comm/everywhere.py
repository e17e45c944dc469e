"""Runs something that may fail on some workers only, and lets all workers raise the same error."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from typing import TypeVar

from lockstep.comm.group import Group
from lockstep.errors import LockstepError

T = TypeVar("T")


def everywhere(group: Group, work: Callable[[], T]) -> T:
    """Run `work`, which may fail on some workers only; then all workers raise that error."""
    error: LockstepError | None = None
    try:
        result = work()
    except LockstepError as found:
        error = found
    message = {"text": str(error), "code": error.exit_code} if error else {}
    told = {"host": socket.gethostname(), **message}
    for rank, text in enumerate(group.all_gather_bytes(json.dumps(told).encode())):
        theirs = json.loads(text)
        if "code" in theirs:
            heard = error if error and rank == group.rank else LockstepError(theirs["text"])
            if rank:
                heard = type(heard)(f"worker {rank} on {theirs['host']}: {theirs['text']}")
            heard.exit_code, heard.everywhere = theirs["code"], True
            raise heard
    return result
