"""Processes that decode images: threads of many cores would wait for each other, for Python's own lock.

They are started when the first batch is read, as many as there are decode threads, and are there until this
process ends. A batch is memory that is shared with them; each gets some of its images at a time.
"""

from __future__ import annotations

import atexit
import json
import math
import mmap
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from threading import Lock

import torch
from torch import Tensor

from lockstep.data.decoding.deal_requests import deal_requests
from lockstep.data.decoding.decode_server import MOST_BYTES
from lockstep.data.images.view_options import View
from lockstep.errors import DataError

_CODE = (
    "import sys; sys.path[:] = sys.argv[2:]; import lockstep.data.decoding.decode_server as d; d.serve_all()"
)
_CHUNKS = 3  # requests for every process in a batch: images differ in size
_MOST_ITEMS = 64  # of a request
Place = tuple[str, int, int]  # the file, and where in it the image begins and how long it is; -1: all of it
Box = tuple[int, int, int, int]  # top, left, height, width


class BadImage(Exception):
    """The image in a slot of the batch cannot be read; the text says why."""

    def __init__(self, slot: int, reason: str) -> None:
        super().__init__(reason)
        self.slot = slot


@cache
def find_decoders(_process: int, count: int) -> DecodeProcesses:
    """The processes of this one, by its number, since a fork does not have them."""
    return DecodeProcesses(count)


class DecodeProcesses:
    """Some processes, each at the end of a socket; they decode one batch at a time."""

    def __init__(self, count: int) -> None:
        self._lock = Lock()
        self._lines: dict[socket.socket, subprocess.Popen[bytes]] = {}
        for _ in range(count):
            mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            command = [sys.executable, "-c", _CODE, str(its.fileno()), *sys.path]
            self._lines[mine] = subprocess.Popen(command, pass_fds=[its.fileno()], stdin=subprocess.DEVNULL)
            its.close()
        atexit.register(self.close)

    def decode(self, places: Sequence[Place], boxes: Sequence[Box] | None, view: View) -> Tensor:
        """Images, or a box of each, as uint8 [N, C, H, W]; BadImage if one cannot be read."""
        count, size = len(places), math.prod(view.shape)
        fd = os.memfd_create("lockstep-images", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, max(count * size, 1))
            memory = mmap.mmap(fd, 0)
            with self._lock:
                if not self._lines:
                    raise DataError("all processes that decode images have ended")
                requests = self._requests(places, boxes, view)
                deal_requests(self._lines, lambda _: next(requests, None), self._fault, fd)
        finally:
            os.close(fd)
        return torch.frombuffer(memory, dtype=torch.uint8)[: count * size].view(count, *view.shape)

    def _requests(self, places: Sequence[Place], boxes: Sequence[Box] | None, view: View) -> Iterator[bytes]:
        known = {"shape": view.shape, "share": view.share}
        most = min(max(-(-len(places) // (_CHUNKS * len(self._lines))), 1), _MOST_ITEMS)
        first = 0
        while first < len(places):
            items = [
                (slot, *places[slot], boxes[slot] if boxes else ())
                for slot in range(first, min(first + most, len(places)))
            ]
            text = json.dumps({**known, "items": items}).encode()
            while len(text) > MOST_BYTES:  # long names
                items = items[: len(items) // 2]
                text = json.dumps({**known, "items": items}).encode()
            yield text
            first += len(items)

    def _fault(self, line: socket.socket, answer: bytes) -> Exception | None:
        if answer:
            told = json.loads(answer)
            return BadImage(*told) if told else None
        code = self._lines.pop(line).wait()
        line.close()
        return DataError(f"a process that decodes images ended with exit code {code}: --resume RUN goes on")

    def close(self) -> None:
        """End the processes."""
        for line, process in self._lines.items():
            line.close()
            process.kill()
            process.wait()
