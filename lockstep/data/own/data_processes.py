"""Processes that read a user's data set beside the one that trains: `Launch(data_processes=N)`.

They are forked before this process has threads or a GPU, and so have the data set as it is then. Samples come
back through memory that is shared for one batch. Which process reads a sample changes nothing of it.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import signal
import socket
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from lockstep.data.decoding.deal_requests import deal_requests
from lockstep.data.own.sample_server import REQUEST_BYTES, SampleForm, serve_samples
from lockstep.kernels.structure import map_tensors
from lockstep.spec.start.stop_signal import STOPPING

_ALIGN = 64
_INDEX_BYTES = 64  # of a request, for each sample
_CHUNKS, _MOST = 4, 256  # requests for every process in a batch, and samples in a request


class UnreadSample(Exception):
    """The sample at `place` of a batch could not be read; the text says why."""

    def __init__(self, place: int, text: str) -> None:
        super().__init__(text)
        self.place = place


class UnlikeSample(Exception):
    """The sample at `place` of a batch has not the form of the others."""

    def __init__(self, place: int) -> None:
        self.place = place


_running: list[DataProcesses] = []


def find_processes(data: Any) -> DataProcesses | None:
    """The processes that have a data set, if there are any."""
    return next((each for each in _running if each.has(data)), None)


@contextmanager
def data_processes(data: Any, count: int, begin: Callable[[], None]) -> Iterator[None]:
    """Read `data`, a data set or a pair, by `count` processes from here on; each calls `begin` first."""
    if not count:
        yield
        return
    processes = DataProcesses(data if isinstance(data, tuple) else (data,), count, begin)
    _running.append(processes)
    try:
        yield
    finally:
        _running.remove(processes)
        processes.close()


class DataProcesses:
    """Some processes, each with a socket; one batch is read at a time."""

    def __init__(self, parts: Sequence[Any], count: int, begin: Callable[[], None]) -> None:
        self._parts, self._lock = parts, threading.Lock()
        self._lines: dict[socket.socket, int] = {}  # the pid of each process
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)  # until a child ignores them
        try:
            for _ in range(count):
                self._fork(begin)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _fork(self, begin: Callable[[], None]) -> None:
        mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about forking beside threads: numpy's are idle
            pid = os.fork()
        if not pid:
            for line in (mine, *self._lines):
                line.close()
            serve_samples(its, self._parts, begin)
        its.close()
        self._lines[mine] = pid

    def has(self, data: Any) -> bool:
        """Whether this is a data set, or one of the pair, that the processes have."""
        return any(data is part for part in self._parts)

    def read(
        self, data: Any, indices: list[int], form: SampleForm, shape: Sequence[int], dtype: torch.dtype
    ) -> tuple[Tensor, Any]:
        """Images and targets of some samples of a data set."""
        parts = form.parts()
        sizes = [math.prod(shape) * dtype.itemsize, *(part.nbytes for part in parts)]
        starts = [0]
        for size in sizes:
            starts.append(-(-(starts[-1] + len(indices) * size) // _ALIGN) * _ALIGN)
        marks = starts.pop()
        fd = os.memfd_create("lockstep-samples", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, marks + 8 * len(self._lines))
            memory = mmap.mmap(fd, 0)
            request = {
                "part": next(number for number, part in enumerate(self._parts) if part is data),
                "has_labels": form.has_labels,
                "told": form.told,
                "starts": starts,
            }
            if len(json.dumps(request)) + _MOST * _INDEX_BYTES > REQUEST_BYTES:
                raise UnreadSample(0, "its target has too many parts for data_processes: leave that out")
            with self._lock:
                self._deal(request, indices, fd, memory, marks)
        finally:
            os.close(fd)
        rest = iter(starts)

        def take(like: Tensor) -> Tensor:
            return _tensor_at(memory, next(rest), (len(indices), *like.shape), like.dtype)

        images = take(torch.empty(tuple(shape), dtype=dtype, device="meta"))
        return images, take(parts[0]) if form.has_labels else map_tensors(take, form.target)

    def _deal(
        self, request: dict[str, Any], indices: list[int], fd: int, memory: mmap.mmap, marks: int
    ) -> None:
        """Give every process a few samples at a time until all are read."""
        if not self._lines:
            raise UnreadSample(0, "all data processes have ended")
        size = max(min(-(-len(indices) // (_CHUNKS * len(self._lines))), _MOST), 1)
        todo = iter([range(i, min(i + size, len(indices))) for i in range(0, len(indices), size)])
        places = {line: marks + 8 * number for number, line in enumerate(self._lines)}  # which it is at

        def next_request(line: socket.socket) -> bytes | None:
            part = next(todo, None)
            if part is None:
                return None
            wanted, mark = [indices[place] for place in part], places[line]
            memory[mark : mark + 8] = part[0].to_bytes(8, "little")
            return json.dumps({**request, "places": list(part), "indices": wanted, "mark": mark}).encode()

        def find_fault(line: socket.socket, answer: bytes) -> Exception | None:
            mark = places[line]
            return self._fault(line, answer, int.from_bytes(memory[mark : mark + 8], "little"))

        deal_requests(self._lines, next_request, find_fault, fd)

    def _fault(self, line: socket.socket, answer: bytes, place: int) -> Exception | None:
        if not answer:
            line.close()
            ended = _fate(self._lines.pop(line))
            return UnreadSample(place, f"its data process ended ({ended}) while it read the sample")
        told = json.loads(answer)
        if not told:
            return None
        error = told["error"]
        return UnlikeSample(told["place"]) if error is None else UnreadSample(told["place"], error)

    def close(self) -> None:
        """End the processes."""
        for line, pid in self._lines.items():
            line.close()
            with suppress(ProcessLookupError, ChildProcessError):  # in case someone else has waited for it
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        self._lines = {}


def _fate(pid: int) -> str:
    """How a process ended, in a word."""
    try:
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except ChildProcessError:
        return "unknown how"
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _tensor_at(memory: mmap.mmap, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor that lies in a piece of memory, and keeps it."""
    count = math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=start).view(shape)
