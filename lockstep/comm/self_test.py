"""Tests every operation of a group on known values, for `lockstep doctor --comm`.

The command runs it on each backend and device; nothing here depends on how the group was formed.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.comm.group import Group
from lockstep.comm.transport import Round
from lockstep.errors import GroupLost

OK = "ok"
_SIZES = (1, 7, 65_537)  # the last is too large for MPI or a socket to send before the receiver is ready
_DTYPES = (torch.float32, torch.int64)
_KINDS = 11  # different sets of values: few, so that sums over 1000 workers are exact in float32
_LATE_S = 0.05  # the delay of worker 0 before the barrier


@dataclass(frozen=True)
class _Case:
    """One size and type of tensor in a group, and the wrong results so far.

    A wrong result is noted, not raised: if a worker left an operation, the others would wait for it.
    """

    group: Group
    device: torch.device
    dtype: torch.dtype
    size: int
    wrong: list[str]

    @property
    def ranks(self) -> range:
        return range(self.group.size)

    @property
    def roots(self) -> list[int]:
        """The workers that are the root of an operation in turn: the first, the middle and the last one."""
        return sorted({0, self.group.size // 2, self.group.size - 1})

    def values(self, number: int, size: int | None = None) -> Tensor:
        """The values that worker `number` holds."""
        values = torch.arange(self.size if size is None else size) % 251 + 1000 * (number % _KINDS)
        return values.to(self.device, self.dtype)

    def empty(self, *shape: int) -> Tensor:
        """A buffer for a result, filled with a value that no result has."""
        return torch.full(shape, -1, dtype=self.dtype, device=self.device)

    def all_values(self) -> Tensor:
        return torch.stack([self.values(rank) for rank in self.ranks])

    def sums(self) -> Tensor:
        return self.all_values().sum(0)

    def expect(self, found: Tensor, wanted: Tensor) -> None:
        wrong = (found != wanted).flatten().nonzero().flatten()
        if len(wrong):
            place = int(wrong[0])
            self.wrong.append(
                f"element {place} of {found.numel()} ({self.dtype}) is {found.flatten()[place].item():g}, "
                f"not {wanted.flatten()[place].item():g}"
            )


def check_group(group: Group, device: torch.device, found: dict[str, str] | None = None) -> dict[str, str]:
    """For every operation "ok" or the reason why it failed; the same on all workers.

    `found` is filled as operations end, so that a caller in another thread can see where a group hangs. After
    each operation the workers exchange their outcomes. If that fails too, the group is lost, and the
    operations missing from the result were not reached.
    """
    found = {} if found is None else found
    for name, operation in OPERATIONS.items():
        outcome = _try(operation, group, device)
        try:
            found[name] = _agree(group, outcome)
        except GroupLost as error:
            found[name] = outcome if outcome != OK else _reason(error)
            break
    return found


def _try(operation: Callable[[_Case], None], group: Group, device: torch.device) -> str:
    wrong: list[str] = []
    try:
        for dtype, size in itertools.product(_DTYPES, _SIZES):
            operation(_Case(group, device, dtype, size, wrong))
    except Exception as error:  # any error of a backend is a result of the test
        return _reason(error)
    return wrong[0] if wrong else OK


def _agree(group: Group, outcome: str) -> str:
    """The first bad outcome of any worker, with the worker's number, or "ok"."""
    outcomes = [message.decode() for message in group.all_gather_bytes(outcome.encode())]
    return next((f"worker {rank}: {text}" for rank, text in enumerate(outcomes) if text != OK), OK)


def _reason(error: BaseException) -> str:
    """An error as one line; for a lost group, the message of the backend."""
    cause = error.__cause__ or error
    return (str(cause).strip().splitlines() or [type(cause).__name__])[0]


def _send(case: _Case) -> None:
    """Each worker sends to the next, one at a time: if all sent at once, they might wait for each other."""
    for rank in case.ranks:
        _pass(case, rank, (rank + 1) % case.group.size)


def _recv(case: _Case) -> None:
    """Worker 0 receives from each of the others."""
    for rank in case.ranks:
        _pass(case, rank, 0)


def _pass(case: _Case, source: int, to: int) -> None:
    if source == to:
        return
    if case.group.rank == source:
        case.group.send(case.values(source), to)
    elif case.group.rank == to:
        output = case.empty(case.size)
        case.group.recv(output, source)
        case.expect(output, case.values(source))


def _broadcast(case: _Case) -> None:
    for source in case.roots:
        tensor = case.values(source) if case.group.rank == source else case.empty(case.size)
        case.group.broadcast(tensor, source)
        case.expect(tensor, case.values(source))


def _all_reduce(case: _Case) -> None:
    tensor = case.values(case.group.rank)
    case.group.all_reduce(tensor)
    case.expect(tensor, case.sums())


def _reduce(case: _Case) -> None:
    for to in case.roots:
        tensor = case.values(case.group.rank)
        case.group.reduce(tensor, to)
        if case.group.rank == to:
            case.expect(tensor, case.sums())


def _all_gather(case: _Case) -> None:
    output = case.empty(case.group.size, case.size)
    case.group.all_gather(output, case.values(case.group.rank))
    case.expect(output, case.all_values())


def _gather(case: _Case) -> None:
    for to in case.roots:
        output = case.empty(case.group.size, case.size) if case.group.rank == to else None
        case.group.gather(output, case.values(case.group.rank), to)
        if output is not None:
            case.expect(output, case.all_values())


def _scatter(case: _Case) -> None:
    for source in case.roots:
        output = case.empty(case.size)
        case.group.scatter(output, case.all_values() if case.group.rank == source else None, source)
        case.expect(output, case.values(case.group.rank))


def _reduce_scatter(case: _Case) -> None:
    output = case.empty(case.size)
    parts = [case.values(case.group.rank + part) for part in case.ranks]  # a different part for each worker
    case.group.reduce_scatter(output, torch.cat(parts))
    mine = case.group.rank
    case.expect(output, torch.stack([case.values(rank + mine) for rank in case.ranks]).sum(0))


def _all_to_all(case: _Case) -> None:
    _exchange(case, lambda source, to: case.size)


def _all_to_all_uneven(case: _Case) -> None:
    """Some workers send nothing to some others: of two workers, worker 0 sends but receives nothing."""
    _exchange(case, lambda source, to: case.size * to * (source + 1) % (3 * case.size))


def _exchange(case: _Case, count: Callable[[int, int], int]) -> None:
    mine = case.group.rank
    sent = [count(mine, to) for to in case.ranks]
    received = [count(source, mine) for source in case.ranks]
    given = torch.cat([case.values(mine + 3 * to, n) for to, n in enumerate(sent)])
    output = case.empty(sum(received))
    case.group.all_to_all(output, given, received, sent)
    wanted = [case.values(source + 3 * mine, n) for source, n in enumerate(received)]
    case.expect(output, torch.cat(wanted))


def _swap(case: _Case) -> None:
    """Every worker returns, in the second round, what it gets from the others in the first."""
    mine, others = case.group.rank, case.group.others
    output = {rank: case.empty(2, case.size).cpu() for rank in others}
    given = {rank: case.values(mine + 3 * rank).cpu() for rank in others}
    first = Round([(rank, output[rank][0]) for rank in others], list(given.items()))
    second = Round([(rank, output[rank][1]) for rank in others], first.received)
    case.group.swap(first, lambda: None, second)
    for rank in others:
        case.expect(output[rank], torch.stack([case.values(rank + 3 * mine).cpu(), given[rank]]))


def _barrier(case: _Case) -> None:
    """Worker 0 comes late: it sleeps after all others have told it that they are at the barrier."""
    start = time.monotonic()
    for rank in case.ranks[1:]:
        _pass(case, rank, 0)
    if case.group.rank == 0:
        time.sleep(_LATE_S)
    case.group.barrier()
    if time.monotonic() - start < _LATE_S:
        case.wrong.append("it did not wait for worker 0")


OPERATIONS: dict[str, Callable[[_Case], None]] = {
    "send": _send,
    "recv": _recv,
    "broadcast": _broadcast,
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "all_gather": _all_gather,
    "gather": _gather,
    "scatter": _scatter,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "all_to_all uneven": _all_to_all_uneven,
    "swap": _swap,
    "barrier": _barrier,
}
