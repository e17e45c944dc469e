"""How bytes travel between workers: torch.distributed's process groups (gloo, nccl) or mpi4py.

Both transports know the same operations on tensors that lie where they can reach them; `Group` is the
only caller, and stages what lies elsewhere. Nothing is pickled: every message is the bytes of a tensor.
"""

from __future__ import annotations

import atexit
import os
import socket
import stat
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.spec.launch import RESTART_CODE

_TIMEOUT = timedelta(minutes=30)  # of one collective: a peer may be saving, or reading a slow disk
_ABORT_S = 10.0
_LAST_WORDS_S = 0.3  # an mpirun drops what it has not read when a process ends the job
_MOVE, _GATHER = 0, 1  # tags, so that two operations on one pair never meet


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
    def barrier(self) -> None: ...
    def close(self) -> None: ...
    def abort(self) -> None: ...
    def cut(self) -> None: ...


class TorchTransport:
    """gloo or nccl, as an object of its own: the default group of a script is left alone."""

    def __init__(self, name: str, store: Any, rank: int, size: int, address: str) -> None:
        self.name, self._rank, self._size = name, rank, size
        before = _sockets()
        self._group = (
            _make_gloo(store, rank, size, address) if name == "gloo" else _make_nccl(store, rank, size)
        )
        self._own = {fd: inode for fd, inode in _sockets().items() if before.get(fd) != inode}

    def send(self, tensor: Tensor, to: int) -> None:
        self._group.send([tensor], to, _MOVE).wait()

    def recv(self, tensor: Tensor, source: int) -> None:
        self._group.recv([tensor], source, _MOVE).wait()

    def broadcast(self, tensor: Tensor, source: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = source
        self._group.broadcast([tensor], options).wait()

    def all_reduce(self, tensor: Tensor) -> None:
        self._group.allreduce([tensor]).wait()

    def reduce(self, tensor: Tensor, to: int) -> None:
        options = dist.ReduceOptions()
        options.rootRank = to
        self._group.reduce([tensor], options).wait()

    def all_gather(self, output: Tensor, tensor: Tensor) -> None:
        if self.name == "nccl":
            self._group._allgather_base(output, tensor).wait()
            return
        # gloo's own all-gather is a ring that waits at each hop: a third of the speed at 100 MB
        parts, works = output.view(self._size, -1), []
        for distance in range(1, self._size):
            source, to = (self._rank - distance) % self._size, (self._rank + distance) % self._size
            works += [self._group.recv([parts[source]], source, _GATHER)]
            works += [self._group.send([tensor], to, _GATHER)]
        parts[self._rank].copy_(tensor.view(-1))
        for work in works:
            work.wait()

    def gather(self, output: Tensor | None, tensor: Tensor, to: int) -> None:
        options = dist.GatherOptions()
        options.rootRank = to
        outputs = [] if output is None else [list(output.view(self._size, *tensor.shape))]
        self._group.gather(outputs, [tensor], options).wait()

    def scatter(self, output: Tensor, tensor: Tensor | None, source: int) -> None:
        options = dist.ScatterOptions()
        options.rootRank = source
        inputs = [] if tensor is None else [list(tensor.view(self._size, *output.shape))]
        self._group.scatter([output], inputs, options).wait()

    def reduce_scatter(self, output: Tensor, tensor: Tensor) -> None:
        self._group._reduce_scatter_base(output, tensor).wait()

    def all_to_all(
        self, output: Tensor, tensor: Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> None:
        self._group.alltoall_base(output, tensor, list(received), list(sent)).wait()

    def barrier(self) -> None:
        self._group.barrier().wait()

    def close(self) -> None:
        if self.name == "nccl":
            self._group.shutdown()
        self._group = None

    def abort(self) -> None:
        """Let the others know at once; taking a group apart takes a while, and nobody waits for that."""
        self.cut()
        held, self._group = [self._group], None
        threading.Thread(target=held.clear, name="lockstep-drop", daemon=True).start()

    def cut(self) -> None:
        """Shut the connections, so that whoever waits in a collective fails at once."""
        if self.name == "nccl":
            self._abort_nccl()
            return
        # gloo's own abort does not wake a thread that waits; its listener must be left alone
        now = _sockets()
        for fd, inode in self._own.items():
            if now.get(fd) == inode:
                with suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
                    connection.getpeername()
                    connection.shutdown(socket.SHUT_RDWR)

    def _abort_nccl(self) -> None:
        """NCCL may hang in its own abort: then this worker is started anew, with the state of another."""
        group, done = self._group, threading.Event()
        if group is None:
            return

        def work() -> None:
            with suppress(RuntimeError):
                group.abort()
            done.set()

        threading.Thread(target=work, name="lockstep-abort", daemon=True).start()
        if not done.wait(_ABORT_S):
            os._exit(RESTART_CODE)


class MpiTransport:
    """MPI_COMM_WORLD by mpi4py, on CPU memory."""

    name = "mpi"

    def __init__(self) -> None:
        from mpi4py import MPI

        self._sum, self._comm = MPI.SUM, MPI.COMM_WORLD

    def send(self, tensor: Tensor, to: int) -> None:
        self._comm.Send(tensor.numpy(), to)

    def recv(self, tensor: Tensor, source: int) -> None:
        self._comm.Recv(tensor.numpy(), source)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        self._comm.Bcast(tensor.numpy(), source)

    def all_reduce(self, tensor: Tensor) -> None:
        self._comm.Allreduce(tensor.clone().numpy(), tensor.numpy(), self._sum)

    def reduce(self, tensor: Tensor, to: int) -> None:
        self._comm.Reduce(tensor.clone().numpy(), tensor.numpy(), self._sum, to)

    def all_gather(self, output: Tensor, tensor: Tensor) -> None:
        self._comm.Allgather(tensor.numpy(), output.numpy())

    def gather(self, output: Tensor | None, tensor: Tensor, to: int) -> None:
        self._comm.Gather(tensor.numpy(), None if output is None else output.numpy(), to)

    def scatter(self, output: Tensor, tensor: Tensor | None, source: int) -> None:
        self._comm.Scatter(None if tensor is None else tensor.numpy(), output.numpy(), source)

    def reduce_scatter(self, output: Tensor, tensor: Tensor) -> None:
        self._comm.Reduce_scatter_block(tensor.numpy(), output.numpy(), self._sum)

    def all_to_all(
        self, output: Tensor, tensor: Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> None:
        self._comm.Alltoallv((tensor.numpy(), list(sent)), (output.numpy(), list(received)))

    def barrier(self) -> None:
        self._comm.Barrier()

    def close(self) -> None:
        """MPI ends with the process."""

    def abort(self) -> None:
        """End all processes of the job once this one has said why: MPI_Finalize would wait for them."""
        atexit.register(self._end)

    def cut(self) -> None:
        """MPI has nothing of the kind."""

    def _end(self) -> None:
        sys.stderr.flush()
        time.sleep(_LAST_WORDS_S)
        self._comm.Abort(1)


def _sockets() -> dict[int, int]:
    """This process's sockets, by descriptor, and what tells them from others that get their number later."""
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


def _make_nccl(store: Any, rank: int, size: int) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = _TIMEOUT
    group = dist.ProcessGroupNCCL(store, rank, size, options)
    group.eager_connect_single_device(torch.device("cuda", torch.cuda.current_device()))
    return group
