"""A process that decodes images for another: it gets places of files by a socket, and fills shared memory.

`decode_processes` starts it. It imports no torch, ends when the other one does, and leaves Ctrl-C to it.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import socket
import sys
from contextlib import suppress
from stat import S_ISREG

import numpy as np

from lockstep.data.decoding.decode import UNREADABLE, Pixels, cut_image, explain_unreadable, fit_image
from lockstep.spec.start.stop_signal import STOPPING

MOST_BYTES = 1 << 17  # of a message


def serve_all() -> None:
    """Answer requests until the socket is closed: an empty list, or what is wrong with an image."""
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)
    line = socket.socket(fileno=int(sys.argv[1]))
    with suppress(OSError):  # the other has ended
        while True:
            message, fds, _, _ = socket.recv_fds(line, MOST_BYTES, 1)
            if not message:
                return
            request = json.loads(message)
            memory: Pixels = np.frombuffer(mmap.mmap(fds[0], 0), np.uint8)
            os.close(fds[0])
            answer = _fill(memory, request["shape"], request["share"], request["items"])
            del memory  # which unmaps it
            line.send(json.dumps(answer).encode())


def _fill(
    memory: Pixels, shape: list[int], share: float, items: list[tuple[int, str, int, int, list[int]]]
) -> list[object]:
    """Decode images, each into its slot of the memory; returns the slot of a bad one, and why."""
    size = int(np.prod(shape))
    for slot, path, start, length, box in items:
        out = memory[slot * size : (slot + 1) * size].reshape(shape)
        try:
            data = read_bytes(path) if length < 0 else _read_part(path, start, length)
            if box:
                cut_image(data, (box[0], box[1], box[2], box[3]), out)
            else:
                fit_image(data, out, share)
        except UNREADABLE as error:
            return [slot, explain_unreadable(error)]
        except Exception as error:
            return [slot, repr(error)]
    return []


def _read_part(path: str, start: int, length: int) -> bytes:
    """Some bytes of a shard."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.pread(fd, length, start)
    finally:
        os.close(fd)


def read_bytes(path: str, most: int = -1) -> bytes:
    """The bytes of a file, or its first ones; a pipe or a device, which may never end, is refused."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        if not S_ISREG(status.st_mode):
            raise OSError("no file")
        size = status.st_size if most < 0 else min(status.st_size, most)
        data = os.read(fd, size)
        while len(data) < size and (more := os.read(fd, size - len(data))):
            data += more
        return data
    finally:
        os.close(fd)
