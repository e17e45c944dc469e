"""The MPI backend of a group, by mpi4py."""

from __future__ import annotations

import atexit
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from lockstep.comm.transport import Round

_LAST_WORDS_S = 0.3  # wait before an abort, at which mpirun drops output that it has not read yet


class MpiTransport:
    """The operations of a transport on MPI_COMM_WORLD, for tensors in CPU memory."""

    name = "mpi"

    def __init__(self) -> None:
        from mpi4py import MPI

        self._sum, self._comm, self._wait_all = MPI.SUM, MPI.COMM_WORLD, MPI.Request.Waitall

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

    def swap(self, first: Round, between: Callable[[], None], second: Round) -> None:
        arriving, leaving, later = self._receive(first), self._send(first), self._receive(second)
        self._wait_all(arriving)
        between()
        self._wait_all(leaving + later + self._send(second))

    def barrier(self) -> None:
        self._comm.Barrier()

    def close(self) -> None:
        """Do nothing: MPI ends with the process."""

    def abort(self) -> None:
        """Abort the whole job at exit, after the error is printed: MPI_Finalize would wait for the others."""
        atexit.register(self._end)

    def cut(self) -> None:
        """Do nothing: MPI cannot interrupt an operation."""

    def _receive(self, messages: Round) -> list[Any]:
        return [self._comm.Irecv(tensor.numpy(), source) for source, tensor in messages.received]

    def _send(self, messages: Round) -> list[Any]:
        return [self._comm.Isend(tensor.numpy(), to) for to, tensor in messages.sent]

    def _end(self) -> None:
        sys.stderr.flush()
        time.sleep(_LAST_WORDS_S)
        self._comm.Abort(1)
