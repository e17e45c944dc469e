"""A group of workers: broadcast, all-gather, all-to-all and the like, on any backend.

A gradient's path: backward → lane tree → bucket → group → lane tree → optimizer. Data is sent as bytes, so
every backend can carry any dtype. Tensors on a GPU that no transport reaches go through host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.comm.transport import Round, Transport
from lockstep.errors import GroupLost

_LENGTH, _SHORT = 8, 1024  # bytes: a length prefix; the longest row that needs only one collective
_Operation = Callable[[Transport, Any, Any], None]  # (transport, output, input)
MakePart = Callable[[str, Sequence[int]], "Group"]  # (name, ranks)


class Group:
    """`size` workers, of which this process is number `rank`; without a transport it is the only one."""

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        host: Transport | None = None,
        gpu: Transport | None = None,
        on_one_host: bool = False,
    ) -> None:
        assert host is not None or size == 1
        self.rank, self.size, self.on_one_host = rank, size, on_one_host
        self.host, self.gpu = host, gpu
        self.on_abort: list[Callable[[], None]] = []
        self.on_cut: list[Callable[[], None]] = []
        self.parts: list[Group] = []  # groups of some of its workers, which live with it
        self.make_part: MakePart | None = None
        self.is_cut = False

    @property
    def backend(self) -> str:
        """The name of the transport that carries the gradients."""
        transport = self.gpu or self.host
        return transport.name if transport else "none"

    @property
    def others(self) -> list[int]:
        """The other workers, the next one first, so that not all send to the same one at once."""
        return [(self.rank + distance) % self.size for distance in range(1, self.size)]

    def stages(self, device: torch.device) -> bool:
        """Whether tensors on `device` go through host memory."""
        return device.type != "cpu" and self.gpu is None and self.host is not None

    def send(self, tensor: Tensor, to: int) -> None:
        """Send a tensor to one worker."""
        self._run(lambda t, output, given: t.send(given, to), None, tensor)

    def recv(self, tensor: Tensor, source: int) -> None:
        """Receive a tensor from one worker, in place."""
        self._run(lambda t, output, given: t.recv(output, source), tensor, None)

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Copy one worker's tensor to all workers, in place."""
        self._run(lambda t, output, given: t.broadcast(output, source), tensor, None)

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum over workers in place, in an order the backend chooses: not for values whose bits matter."""
        self._run(lambda t, output, given: t.all_reduce(output), tensor, None, as_bytes=False)

    def reduce(self, tensor: Tensor, to: int = 0) -> None:
        """Sum over workers, in place at one of them; in an order the backend chooses."""
        self._run(lambda t, output, given: t.reduce(output, to), tensor, None, as_bytes=False)

    def all_gather(self, output: Tensor, tensor: Tensor) -> None:
        """Fill `output` [W, …] with the tensors of all workers."""
        self._run(lambda t, output, given: t.all_gather(output, given), output, tensor)

    def gather(self, output: Tensor | None, tensor: Tensor, to: int = 0) -> None:
        """Fill `output` [W, …], which only worker `to` passes, with the tensors of all workers."""
        self._run(lambda t, output, given: t.gather(output, given, to), output, tensor)

    def scatter(self, output: Tensor, tensor: Tensor | None, source: int = 0) -> None:
        """Fill `output` with this worker's part of the `tensor` [W, …] that only worker `source` passes."""
        self._run(lambda t, output, given: t.scatter(output, given, source), output, tensor)

    def reduce_scatter(self, output: Tensor, tensor: Tensor) -> None:
        """Fill `output` with this worker's part of the sum; in an order the backend chooses."""
        self._run(lambda t, output, given: t.reduce_scatter(output, given), output, tensor, as_bytes=False)

    def all_to_all(
        self, output: Tensor, tensor: Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> None:
        """Send `sent[i]` elements of a flat tensor to worker i, and receive `received[i]` from it."""
        size = tensor.element_size()
        counts = [n * size for n in received], [n * size for n in sent]
        # a worker with nothing to send or receive takes part too, since other workers may have something
        self._run(lambda t, output, given: t.all_to_all(output, given, *counts), output, tensor, empty=True)

    def swap(self, first: Round, between: Callable[[], None], second: Round) -> None:
        """Exchange two rounds of messages; `between` runs once all of the first round have arrived here.

        Every worker calls it. Messages from one worker to another arrive in the order of the lists.
        """
        failed: list[Exception] = []

        def work() -> None:
            try:
                between()
            except Exception as error:
                failed.append(error)
                raise

        try:
            transport = self.host
            if transport:
                self._try(transport, lambda: transport.swap(first, work, second))
            else:
                between()
        except GroupLost:
            if failed:
                raise failed[0] from None  # not the fault of another worker
            raise

    def barrier(self) -> None:
        """Wait until every worker is here."""
        self._run(lambda t, output, given: t.barrier(), None, None)

    def all_gather_bytes(self, message: bytes) -> list[bytes]:
        """The messages of all workers, of any length; short messages need only one collective."""
        framed = len(message).to_bytes(_LENGTH, "little") + message
        rows = self._gather_rows(framed[:_SHORT].ljust(_SHORT, b"\0"))
        sizes = [int.from_bytes(row[:_LENGTH], "little") for row in rows]
        longest = _LENGTH + max(sizes)
        if longest > _SHORT:
            rows = self._gather_rows(framed.ljust(longest, b"\0"))
        return [row[_LENGTH : _LENGTH + size] for row, size in zip(rows, sizes, strict=True)]

    def broadcast_bytes(self, message: bytes, source: int = 0) -> bytes:
        """One worker's message, on all of them."""
        framed = len(message).to_bytes(_LENGTH, "little") + message
        data = _tensor(framed[:_SHORT].ljust(_SHORT, b"\0"))
        self.broadcast(data, source)
        size = _LENGTH + int.from_bytes(data[:_LENGTH].numpy().tobytes(), "little")
        if size > _SHORT:
            data = _tensor(framed) if self.rank == source else torch.zeros(size, dtype=torch.uint8)
            self.broadcast(data, source)
        return data[_LENGTH:size].numpy().tobytes()

    def _gather_rows(self, row: bytes) -> list[bytes]:
        found = torch.zeros(self.size, len(row), dtype=torch.uint8)
        self.all_gather(found, _tensor(row))
        return [theirs.numpy().tobytes() for theirs in found]

    def close(self) -> None:
        """Leave the group at the end; every worker does."""
        for part in self.parts:
            part.close()
        for transport in (self.gpu, self.host):
            if transport:
                transport.close()

    def abort(self) -> None:
        """Leave because of an error in this worker, so that the others do not wait for it."""
        for part in self.parts:
            part.abort()
        for leave in self.on_abort:
            leave()
        for transport in (self.gpu, self.host):
            if transport:
                transport.abort()

    def check(self) -> None:
        """Raise GroupLost if NCCL was aborted: it raises no error itself, and may leave wrong results."""
        if self.is_cut and self.gpu is not None:
            raise GroupLost("another generation has begun")

    def cut(self) -> None:
        """Make the operation that this worker waits for fail at once; called from another thread."""
        self.is_cut = True
        for cut in [*self.on_cut, *(part.cut for part in self.parts)]:
            cut()
        for transport in (self.gpu, self.host):
            if transport:
                transport.cut()

    def _run(
        self,
        operation: _Operation,
        output: Tensor | None,
        given: Tensor | None,
        as_bytes: bool = True,
        empty: bool = False,
    ) -> None:
        """Run an operation that fills `output` and reads `given`; every worker runs the same one.

        Empty tensors are not sent, unless `empty` says that other workers' tensors may not be empty.
        """
        tensors = [tensor for tensor in (output, given) if tensor is not None]
        if not self.host:
            if output is not None and given is not None:
                output.copy_(given.reshape(output.shape))
            return
        if tensors and not empty and not any(tensor.numel() for tensor in tensors):
            return
        on_gpu = any(tensor.is_cuda for tensor in tensors)
        transport = self.gpu if on_gpu and self.gpu else self.host
        staged = on_gpu and not self.gpu
        near = [None if tensor is None else _near(tensor, staged) for tensor in (output, given)]
        views = [_bytes(tensor) if tensor is not None and as_bytes else tensor for tensor in near]
        self._try(transport, lambda: operation(transport, *views))
        if output is not None and near[0] is not output:
            assert near[0] is not None
            output.copy_(near[0])

    def _try(self, transport: Transport, operation: Callable[[], None]) -> None:
        """Run an operation of a transport; raise GroupLost if another worker is lost."""
        reason = ""
        try:
            if self.is_cut:
                raise RuntimeError("another generation has begun")
            operation()
        except RuntimeError as error:  # the base of torch's and mpi4py's errors
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if reason:  # raised outside the handler, whose frames would keep a lost group's sockets open
            raise GroupLost(
                f"worker {self.rank} of {self.size} lost contact with another worker, which has ended or "
                "cannot be reached: see that worker's output, then run the same command with --resume auto "
                f"({transport.name}: {reason})"
            )


def _near(tensor: Tensor, staged: bool) -> Tensor:
    """The tensor itself, or a copy in host memory if `staged`."""
    return (tensor.cpu() if staged else tensor).contiguous()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _tensor(message: bytes) -> Tensor:
    return (
        torch.frombuffer(bytearray(message), dtype=torch.uint8)
        if message
        else torch.zeros(0, dtype=torch.uint8)
    )
