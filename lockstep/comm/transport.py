"""The backends of a group: makes gloo and NCCL process groups, with timeouts; MPI is in `mpi_transport.py`.

All transports have the same operations. `Group` is their only caller; it copies tensors to host memory if
the transport cannot reach them on the GPU. Nothing is pickled: every message is the bytes of a tensor.
"""

from __future__ import annotations

import os
import socket
import stat
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm.background import BackgroundThread, run_in_thread
from lockstep.spec.launch import RESTART_CODE

_TIMEOUT = timedelta(minutes=30)  # of one collective: a peer may be saving, or reading from a slow disk
_ABORT_S = 10.0
_LOOK_S = 0.2  # while waiting, the time between two checks whether the group was cut
_MOVE, _SWAP = 0, 1  # message tags, so that a receive never takes the other operation's message


class Round:
    """Messages to and from other workers: (the other worker, the bytes of a tensor in host memory)."""

    def __init__(
        self, received: Sequence[tuple[int, Tensor]] = (), sent: Sequence[tuple[int, Tensor]] = ()
    ) -> None:
        self.received = [(source, tensor.view(torch.uint8)) for source, tensor in received]
        self.sent = [(to, tensor.view(torch.uint8)) for to, tensor in sent]


class Transport(Protocol):
    """The operations of a backend; every worker calls the same ones in the same order."""

    name: str

    def send(self, tensor: Tensor, to: int) -> None: ...
    def recv(self, tensor: Tensor, source: int) -> None: ...
    def broadcast(self, tensor: Tensor, source: int) -> None: ...
    def all_reduce(self, tensor: Tensor) -> None: ...
    def reduce(self, tensor: Tensor, to: int) -> None: ...
    def all_gather(self, output: Tensor, tensor: Tensor) -> None: ...
    def gather(self, output: Tensor | None, tensor: Tensor, to: int) -> None: ...
    def scatter(self, output: Tensor, tensor: Tensor | None, source: int) -> None: ...
    def reduce_scatter(self, output: Tensor, tensor: Tensor) -> None: ...
    def all_to_all(
        self, output: Tensor, tensor: Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> None: ...
    def swap(self, first: Round, between: Callable[[], None], second: Round) -> None: ...
    def barrier(self) -> None: ...
    def close(self) -> None: ...
    def abort(self) -> None: ...
    def cut(self) -> None: ...


class TorchTransport:
    """A gloo or NCCL process group of our own; the default process group of a script is not touched."""

    _device: torch.device | None
    _waiters: dict[int, BackgroundThread[None]] | None  # by the thread that they wait for

    def __init__(self, name: str, store: Any, rank: int, size: int, at: str | torch.device) -> None:
        """`at` is this worker's address for gloo, or its GPU for NCCL."""
        self.name, self._rank, self._size = name, rank, size
        self._device, self._waiters = None, None
        before = _sockets()
        if isinstance(at, torch.device):
            self._device, self._group = at, _make_nccl(store, rank, size, at)
        else:
            self._waiters, self._group = {}, _make_gloo(store, rank, size, at)
        self._is_cut = False
        self._own = {fd: inode for fd, inode in _sockets().items() if before.get(fd) != inode}

    @classmethod
    def of_script(cls, group: Any) -> TorchTransport:
        """The same over a process group that a script has made; it cannot be cut, and stays the script's."""
        self = cls.__new__(cls)
        self.name, self._rank, self._size = dist.get_backend(group), group.rank(), group.size()
        self._device = self._waiters = None
        self._group, self._is_cut, self._own = group, False, {}
        return self

    def send(self, tensor: Tensor, to: int) -> None:
        self._wait(self._group.send([tensor], to, _MOVE))

    def recv(self, tensor: Tensor, source: int) -> None:
        self._wait(self._group.recv([tensor], source, _MOVE))

    def broadcast(self, tensor: Tensor, source: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = source
        self._wait(self._group.broadcast([tensor], options))

    def all_reduce(self, tensor: Tensor) -> None:
        self._wait(self._group.allreduce([tensor]))

    def reduce(self, tensor: Tensor, to: int) -> None:
        options = dist.ReduceOptions()
        options.rootRank = to
        self._wait(self._group.reduce([tensor], options))

    def all_gather(self, output: Tensor, tensor: Tensor) -> None:
        if self.name == "nccl":
            self._wait(self._group._allgather_base(output, tensor))
            return
        # gloo's own all-gather is a ring that waits at each hop: a third of the speed at 100 MB
        parts, works = output.view(self._size, -1), []
        for distance in range(1, self._size):
            source, to = (self._rank - distance) % self._size, (self._rank + distance) % self._size
            works += [self._group.recv([parts[source]], source, _SWAP)]
            works += [self._group.send([tensor], to, _SWAP)]
        parts[self._rank].copy_(tensor.view(-1))
        self._wait(*works)

    def gather(self, output: Tensor | None, tensor: Tensor, to: int) -> None:
        options = dist.GatherOptions()
        options.rootRank = to
        outputs = [] if output is None else [list(output.view(self._size, *tensor.shape))]
        self._wait(self._group.gather(outputs, [tensor], options))

    def scatter(self, output: Tensor, tensor: Tensor | None, source: int) -> None:
        options = dist.ScatterOptions()
        options.rootRank = source
        inputs = [] if tensor is None else [list(tensor.view(self._size, *output.shape))]
        self._wait(self._group.scatter([output], inputs, options))

    def reduce_scatter(self, output: Tensor, tensor: Tensor) -> None:
        self._wait(self._group._reduce_scatter_base(output, tensor))

    def all_to_all(
        self, output: Tensor, tensor: Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> None:
        self._wait(self._group.alltoall_base(output, tensor, list(received), list(sent)))

    def swap(self, first: Round, between: Callable[[], None], second: Round) -> None:
        """Not for NCCL, which would need each round in one launch."""
        # receives start early: a gloo message leaves only when its receiver is known to be ready
        arriving, leaving, later = self._receive(first), self._send(first), self._receive(second)
        self._wait(*arriving)
        between()
        self._wait(*leaving, *later, *self._send(second))

    def barrier(self) -> None:
        self._wait(self._group.barrier())

    def close(self) -> None:
        if self._waiters is None:
            self._group.shutdown()
        self._end_waiters()
        self._group = None

    def abort(self) -> None:
        """Cut the group, so that the others notice at once; destroy it in the background, as that is slow."""
        self.cut()
        self._end_waiters()
        held, self._group = [self._group], None
        run_in_thread(held.clear, self._device)

    def cut(self) -> None:
        """Shut the connections, so that every worker that waits in a collective fails at once."""
        if self.name == "nccl":
            self._abort_nccl()
            return
        # gloo's own abort does not wake waiting threads; getpeername skips its listener, which must stay open
        now = _sockets()
        for fd, inode in self._own.items():
            if now.get(fd) == inode:
                with suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
                    connection.getpeername()
                    connection.shutdown(socket.SHUT_RDWR)
        self._is_cut = True  # set last: once `_wait` gives up, nothing may arrive in its tensors

    def _receive(self, messages: Round) -> list[Any]:
        return [self._group.recv([tensor], source, _SWAP) for source, tensor in messages.received]

    def _send(self, messages: Round) -> list[Any]:
        return [self._group.send([tensor], to, _SWAP) for to, tensor in messages.sent]

    def _wait(self, *works: Any) -> None:
        """Wait until the operations are done; raise a RuntimeError if the group is cut.

        When a connection ends, gloo drops half-sent and half-received messages, and never wakes the thread
        that waits for them. So a background thread waits, and this one checks for a cut. Every thread that
        waits has its own, as what they wait for may depend on each other.
        """

        def work() -> None:
            for each in works:
                each.wait()

        if self._waiters is None:
            return work()
        here = threading.get_ident()
        if here not in self._waiters:
            self._waiters[here] = BackgroundThread("wait", None)
        done = [self._waiters[here].submit(work)]
        while not wait(done, _LOOK_S).done:
            if self._is_cut:
                raise RuntimeError("the connection was cut")
        return done.pop().result()  # pop: a kept error would keep the group alive

    def _end_waiters(self) -> None:
        for waiter in list((self._waiters or {}).values()):
            waiter.close()

    def _abort_nccl(self) -> None:
        """Abort NCCL. If that hangs, exit: a new worker takes this one's place, with the state of another."""
        group = self._group
        if group and not wait([run_in_thread(group.abort, self._device)], _ABORT_S).done:
            os._exit(RESTART_CODE)


def _sockets() -> dict[int, int]:
    """The inode of each socket by descriptor; it tells a socket from a later one with the same descriptor."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir() if sys.platform == "linux" else ():
        with suppress(OSError):
            state = entry.stat()
            if stat.S_ISSOCK(state.st_mode):
                found[int(entry.name)] = state.st_ino
    return found


def _make_gloo(store: Any, rank: int, size: int, address: str) -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = _TIMEOUT
    return dist.ProcessGroupGloo(store, rank, size, options)


def _make_nccl(store: Any, rank: int, size: int, device: torch.device) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = _TIMEOUT
    group = dist.ProcessGroupNCCL(store, rank, size, options)
    group.eager_connect_single_device(device)
    return group
