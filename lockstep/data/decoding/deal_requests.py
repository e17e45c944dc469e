"""Deals requests to processes over sockets, one at a time to each, until all are answered.

A request brings memory as a descriptor, which the process fills. It serves processes that decode images and
those that read a user's data set.
"""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable, Collection
from contextlib import suppress

ANSWER_BYTES = 1 << 17


def deal_requests(
    lines: Collection[socket.socket],
    next_request: Callable[[socket.socket], bytes | None],
    find_fault: Callable[[socket.socket, bytes], Exception | None],
    fd: int,
) -> None:
    """Give each line its next request whenever it has answered; an empty answer: its process has ended.

    After a fault, what was begun is waited for, so that no answer is left for the next time. Then the first
    one is raised.
    """
    faults: list[Exception] = []
    with selectors.DefaultSelector() as selector:

        def ask(line: socket.socket) -> None:
            request = None if faults else next_request(line)
            if request is not None:
                with suppress(BrokenPipeError, ConnectionResetError):  # it has ended, as its answer will say
                    socket.send_fds(line, [request], [fd])
                selector.register(line, selectors.EVENT_READ)

        for line in list(lines):
            ask(line)
        while selector.get_map():
            for key, _ in selector.select():
                answering = key.fileobj
                assert isinstance(answering, socket.socket)
                selector.unregister(answering)
                if fault := find_fault(answering, _receive(answering)):
                    faults.append(fault)
                else:
                    ask(answering)
    if faults:
        raise faults[0]


def _receive(line: socket.socket) -> bytes:
    try:
        return line.recv(ANSWER_BYTES)
    except OSError:
        return b""
