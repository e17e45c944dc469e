"""A transport that notes every call before another one makes it, and refuses tensors on the wrong device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from lockstep.comm.group import Group, MakePart
from lockstep.comm.recorded.call_log import CallLog
from lockstep.comm.transport import Round, Transport
from lockstep.errors import LockstepError


def record_group(group: Group, folder: Path, device: torch.device | None = None) -> None:
    """Note all calls of a group of all workers, and of the parts that it makes, in a folder of its own.

    `device` is where all tensors have to be; without it any will do. Sums go by calls, even on one host:
    shared memory is no transport.
    """
    _record(group, CallLog(folder, group.rank), "world", range(group.size), device)


def _record(
    group: Group, log: CallLog, name: str, members: Sequence[int], device: torch.device | None
) -> None:
    """`members` are the ranks among all workers."""
    group.on_one_host = False
    if group.host:
        group.host = RecordingTransport(group.host, log, name, members, device)
    if group.gpu:
        group.gpu = RecordingTransport(group.gpu, log, f"{name}, on the GPU", members, device)
    if group.make_part:
        group.make_part = _recording(group.make_part, log, members, device)


def _recording(make: MakePart, log: CallLog, members: Sequence[int], device: torch.device | None) -> MakePart:
    def make_part(name: str, ranks: Sequence[int]) -> Group:
        part = make(name, ranks)
        _record(part, log, name, [members[rank] for rank in ranks], device)
        return part

    return make_part


class RecordingTransport:
    """Makes every call by another transport, whose workers are the `members` of a communicator."""

    def __init__(
        self,
        inner: Transport,
        log: CallLog,
        communicator: str,
        members: Sequence[int],
        device: torch.device | None = None,
    ) -> None:
        """`device` is where tensors have to be; without it any will do."""
        self.name, self._inner, self._log = inner.name, inner, log
        self._communicator, self._members, self._device = communicator, list(members), device

    def send(self, tensor: Tensor, to: int) -> None:
        with self._noted("send", [tensor], to):
            self._inner.send(tensor, to)

    def recv(self, tensor: Tensor, source: int) -> None:
        with self._noted("recv", [tensor], source):
            self._inner.recv(tensor, source)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        with self._noted("broadcast", [tensor], source):
            self._inner.broadcast(tensor, source)

    def all_reduce(self, tensor: Tensor) -> None:
        with self._noted("all_reduce", [tensor]):
            self._inner.all_reduce(tensor)

    def reduce(self, tensor: Tensor, to: int) -> None:
        with self._noted("reduce", [tensor], to):
            self._inner.reduce(tensor, to)

    def all_gather(self, output: Tensor, tensor: Tensor) -> None:
        with self._noted("all_gather", [tensor, output]):
            self._inner.all_gather(output, tensor)

    def gather(self, output: Tensor | None, tensor: Tensor, to: int) -> None:
        with self._noted("gather", [tensor, output], to):
            self._inner.gather(output, tensor, to)

    def scatter(self, output: Tensor, tensor: Tensor | None, source: int) -> None:
        with self._noted("scatter", [output, tensor], source):
            self._inner.scatter(output, tensor, source)

    def reduce_scatter(self, output: Tensor, tensor: Tensor) -> None:
        with self._noted("reduce_scatter", [output, tensor]):
            self._inner.reduce_scatter(output, tensor)

    def all_to_all(
        self, output: Tensor, tensor: Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> None:
        size = tensor.element_size()
        counts = [n * size for n in sent], [n * size for n in received]
        with self._noted("all_to_all", [tensor, output], None, counts):
            self._inner.all_to_all(output, tensor, received, sent)

    def swap(self, first: Round, between: Callable[[], None], second: Round) -> None:
        messages = [
            [*first.sent, *second.sent],
            [*first.received, *second.received],
        ]
        counts = [
            [sum(tensor.nbytes for to, tensor in row if to == rank) for rank in range(len(self._members))]
            for row in messages
        ]
        tensors = [tensor for row in messages for _, tensor in row]
        with self._noted("swap", tensors, None, (counts[0], counts[1])):
            self._inner.swap(first, between, second)

    def barrier(self) -> None:
        with self._noted("barrier", []):
            self._inner.barrier()

    def close(self) -> None:
        self._inner.close()

    def abort(self) -> None:
        self._inner.abort()

    def cut(self) -> None:
        self._inner.cut()

    @contextmanager
    def _noted(
        self,
        operation: str,
        tensors: Sequence[Tensor | None],
        other: int | None = None,
        counts: tuple[list[int], list[int]] | None = None,
    ) -> Iterator[None]:
        """Note a call, and that it is done. The first tensor has the size that all workers share.

        `counts` are the bytes to and from each worker, if each pair of workers has its own.
        """
        given = [tensor for tensor in tensors if tensor is not None]
        for tensor in given:
            self._check_device(operation, tensor)
        first = given[0] if given else torch.empty(0, dtype=torch.uint8)
        sent, received = counts or ([], [])
        number = self._log.begin(
            {
                "communicator": self._communicator,
                "members": self._members,
                "operation": operation,
                "other": None if other is None else self._members[other],
                "num_bytes": 0 if counts else first.nbytes,
                "sent": sent,
                "received": received,
                "dtype": str(first.dtype).removeprefix("torch."),
                "device": str(first.device) if given else "",
            }
        )
        yield
        self._log.end(number)

    def _check_device(self, operation: str, tensor: Tensor) -> None:
        if self._device is not None and tensor.device != self._device:
            raise LockstepError(
                f"worker {self._log.worker}: {operation} on '{self._communicator}' got a tensor on "
                f"{tensor.device}, and that communicator takes tensors on {self._device}"
            )
