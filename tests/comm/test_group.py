"""The group's operations by real gloo, a thread a worker."""

import re
import threading

import pytest
import torch
from patience import PATIENCE_S
from world import in_threads

from lockstep.comm import self_test as checks
from lockstep.comm.group import Group
from lockstep.comm.self_test import OK, OPERATIONS, check_group
from lockstep.errors import GroupLost

pytestmark = pytest.mark.gloo
CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool]
MESSAGES = {
    "empty": [b"", b"", b""],
    "one empty": [b"", b"short", b""],
    "short": [b"a", b"b", b"c"],
    "uneven": [b"x" * 100_003, b"\0", b"\0\0\0"],
    "long": [bytes([n]) * 1_000_001 for n in range(3)],
}


def values(rank, dtype, count=5):
    return (torch.arange(count) * (rank + 2) % 3).to(dtype)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_every_operation(size):
    assert in_threads(size, lambda group: check_group(group, CPU)) == [dict.fromkeys(OPERATIONS, OK)] * size


def test_a_failed_operation_is_named_everywhere_and_the_rest_still_run(monkeypatch):
    def fail(case):
        if case.group.rank == 1:
            raise RuntimeError("no such thing\nand a second line")

    monkeypatch.setattr(checks, "OPERATIONS", {"reduce": fail, "all_reduce": OPERATIONS["all_reduce"]})
    wanted = {"reduce": "worker 1: no such thing", "all_reduce": OK}
    assert in_threads(3, lambda group: check_group(group, CPU)) == [wanted] * 3


@pytest.mark.parametrize("name", [name for name in OPERATIONS if name != "barrier"])
def test_wrong_values_are_found_and_the_rest_still_run(name, monkeypatch):
    original = OPERATIONS[name]

    def spoiled(case):
        def run(operation, output, *rest, **options):
            Group._run(case.group, operation, output, *rest, **options)
            if output is not None:
                output.view(-1)[-1:] += 1

        def swap(first, between, second):
            Group.swap(case.group, first, between, second)
            second.received[-1][1][-1:] += 1

        case.group._run, case.group.swap = run, swap
        original(case)
        del case.group._run, case.group.swap

    monkeypatch.setattr(checks, "OPERATIONS", {name: spoiled, "next": OPERATIONS["all_gather"]})
    found = in_threads(2, lambda group: check_group(group, CPU))
    assert found[0] == found[1]
    assert re.match(r"worker [01]: element \d+ of \d+ \(torch.float32\) is \d+, not \d+", found[0].pop(name))
    assert found[0] == {"next": OK}


def test_a_barrier_that_does_not_wait_is_found(monkeypatch):
    monkeypatch.setattr(Group, "barrier", lambda self: None)
    monkeypatch.setattr(checks, "OPERATIONS", {"barrier": OPERATIONS["barrier"]})
    assert in_threads(2, lambda group: check_group(group, CPU))[0]["barrier"].endswith(
        "did not wait for worker 0"
    )


@pytest.mark.parametrize("kind", MESSAGES)
@pytest.mark.parametrize("size", [1, 3])
def test_messages_of_any_length(kind, size):
    messages = MESSAGES[kind][:size]

    def work(group):
        mine = messages[group.rank]
        told = [group.broadcast_bytes(mine if group.rank == s else b"", s) for s in range(size)]
        return group.all_gather_bytes(mine), told

    assert in_threads(size, work) == [(messages, messages)] * size


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_type_moves(dtype):
    def work(group):
        mine = values(group.rank, dtype)
        every, told, part = torch.zeros(3, 5, dtype=dtype), mine.clone(), torch.zeros(5, dtype=dtype)
        swapped = torch.zeros(6, dtype=dtype)
        group.all_gather(every, mine)
        group.broadcast(told, 2)
        group.scatter(part, every if group.rank == 1 else None, 1)
        group.all_to_all(swapped, torch.cat([mine[:2]] * 3), [2] * 3, [2] * 3)
        return every, told, part, swapped

    wanted = torch.stack([values(rank, dtype) for rank in range(3)])
    for rank, (every, told, part, swapped) in enumerate(in_threads(3, work)):
        assert torch.equal(every, wanted) and torch.equal(told, wanted[2])
        assert torch.equal(part, wanted[rank]) and torch.equal(swapped, wanted[:, :2].reshape(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64], ids=str)
def test_sums(dtype):
    def work(group):
        tensor = values(group.rank, dtype)
        group.all_reduce(tensor)
        return tensor

    wanted = sum(values(rank, dtype) for rank in range(3))
    assert all(torch.equal(found, wanted) for found in in_threads(3, work))


@pytest.mark.parametrize("size", [1, 2])
def test_tensors_with_gaps(size):
    """Neither what is read nor what is filled needs to lie in one piece; what is between stays."""

    def work(group):
        mine = (torch.arange(12.0).view(3, 4) + 100 * group.rank).t()
        every = torch.zeros(size, 4, 6)
        group.all_gather(every[:, :, ::2], mine)
        summed = torch.ones(4, 2)
        group.all_reduce(summed[:, 0])
        return mine, every, summed

    found = in_threads(size, work)
    wanted = torch.stack([mine for mine, _, _ in found])
    for _, every, summed in found:
        assert torch.equal(every[:, :, ::2], wanted) and not every[:, :, 1::2].any()
        assert summed[:, 0].eq(size).all() and summed[:, 1].eq(1).all()


def test_empty_tensors_take_nobody_out_of_step():
    def work(group):
        empty, one, got = torch.zeros(0), torch.ones(1), torch.zeros(1)
        group.broadcast(empty)
        group.all_reduce(empty)
        group.all_gather(torch.zeros(2, 0), empty)
        group.gather(None if group.rank else torch.zeros(2, 0), empty)
        group.all_to_all(empty, empty, [0, 0], [0, 0])
        if group.rank == 0:
            group.send(empty, 1)
            group.send(one, 1)
        else:
            group.recv(empty, 0)
            group.recv(got, 0)
        group.barrier()
        return got.item()

    assert in_threads(2, work) == [0.0, 1.0]


def test_all_to_all_with_a_worker_that_gets_nothing_and_one_that_has_nothing():
    counts = [[0, 2, 0], [0, 1, 0], [0, 0, 0]]  # [from][to]

    def work(group):
        sent, received = counts[group.rank], [row[group.rank] for row in counts]
        output = torch.zeros(sum(received))
        group.all_to_all(output, torch.full((sum(sent),), group.rank + 1.0), received, sent)
        return output.tolist()

    assert in_threads(3, work) == [[], [1.0, 1.0, 2.0], []]


@pytest.mark.parametrize("operation", ["recv", "all_reduce", "all_gather", "all_to_all", "barrier"])
def test_a_worker_that_goes_away_is_noticed(operation):
    gone = threading.Event()
    calls = {
        "recv": lambda group: group.recv(torch.zeros(3), 1),
        "all_reduce": lambda group: group.all_reduce(torch.zeros(3)),
        "all_gather": lambda group: group.all_gather(torch.zeros(2, 3), torch.zeros(3)),
        "all_to_all": lambda group: group.all_to_all(torch.zeros(4), torch.zeros(4), [2, 2], [2, 2]),
        "barrier": lambda group: group.barrier(),
    }

    def work(group):
        group.barrier()
        if group.rank == 1:
            group.abort()
            gone.set()
            return
        gone.wait(PATIENCE_S)
        with pytest.raises(GroupLost, match=r"worker 0 of 2 lost contact.*--resume auto \(gloo: "):
            calls[operation](group)

    in_threads(2, work)


def test_a_check_whose_group_is_lost_says_where():
    def work(group):
        if group.rank == 0:
            return check_group(group, CPU)
        found = {}
        for name, operation in OPERATIONS.items():
            if name == "reduce":
                group.abort()
                return None
            found[name] = checks._agree(group, checks._try(operation, group, CPU))
        return found

    found = in_threads(2, work)[0]
    assert list(found) == ["send", "recv", "broadcast", "all_reduce", "reduce"]
    assert "peer" in found.pop("reduce") and set(found.values()) == {OK}
