"""Memory between workers of a host, and its barrier."""

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from world import in_threads

from lockstep.comm import shared_memory as shared
from lockstep.comm.bucket import ReducedTensor
from lockstep.comm.compress.feedback import Feedback
from lockstep.comm.exchange import Exchange, ExchangeShape, SharedExchange, make_exchange
from lockstep.comm.reducer import Reducer
from lockstep.comm.shared_memory import share
from lockstep.errors import GroupLost
from lockstep.spec.rule.compression import read_compression

pytestmark = pytest.mark.gloo


def test_what_one_writes_all_see():
    def work(group):
        group.on_one_host = True
        memory = share(group, 1000)
        memory.pieces[group.rank].fill_(group.rank + 1)
        memory.barrier()
        return [int(piece.sum()) for piece in memory.pieces]

    assert in_threads(3, work) == [[1000, 2000, 3000]] * 3


def test_nobody_passes_a_barrier_before_all_are_there():
    turns = [0, 0, 0, 0]

    def work(group):
        group.on_one_host = True
        memory, dice = share(group, 8), random.Random(group.rank)
        for turn in range(1, 60):
            if dice.random() < 0.3:
                time.sleep(dice.random() * 0.004)
            turns[group.rank] = turn
            memory.barrier()
            if min(turns) < turn:
                return f"worker {group.rank} passed turn {turn} at {turns}"
        return None

    assert in_threads(4, work) == [None] * 4


def test_the_turn_may_wrap_around():
    def work(group):
        group.on_one_host = True
        memory = share(group, 8)
        memory._turn = 2**32 - 3
        memory._turns[group.rank].value = 2**32 - 3
        group.barrier()
        for _ in range(6):
            memory.barrier()
        return memory._turns[group.rank].value

    assert in_threads(2, work) == [3, 3]


def test_a_worker_that_has_ended_is_noticed():
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()

    def work(group):
        group.on_one_host = True
        memory = share(group, 8)
        if group.rank:
            return None  # it never comes
        memory._processes[1] = gone.pid
        start = time.monotonic()
        with pytest.raises(GroupLost, match="lost worker 1"):
            memory.barrier()
        return time.monotonic() - start

    assert in_threads(2, work)[0] < 5


def shape(workers=2):
    return ExchangeShape([[0]] * workers, 10, torch.float32, None, torch.device("cpu"))


@pytest.mark.parametrize("on_one_host", [True, False])
def test_workers_of_several_hosts_share_nothing(on_one_host):
    def work(group):
        group.on_one_host = on_one_host
        return type(make_exchange(group, shape()))

    assert in_threads(2, work) == [SharedExchange if on_one_host else Exchange] * 2


def test_if_one_cannot_share_none_does(monkeypatch):
    plain = shared._make

    def make(token, num_bytes, seen=[]):  # noqa: B006
        seen.append(token)
        return plain(token, num_bytes) if len(seen) > 1 else -1

    monkeypatch.setattr(shared, "_make", make)

    def work(group):
        group.on_one_host = True
        return type(make_exchange(group, shape(3)))

    assert in_threads(3, work) == [Exchange] * 3


def test_what_plain_buckets_shared_is_given_back_when_compression_begins():
    params = {"weight": torch.zeros(300, 4096), "bias": torch.zeros(7)}
    plain = 2 * 4 * 300 * 4096  # bytes at the least: roots and means

    def shared_bytes():
        rows = [
            line.split()
            for line in Path("/proc/self/maps").read_text().splitlines()
            if "memfd:lockstep" in line
        ]
        return sum(int(end, 16) - int(start, 16) for start, end in (row[0].split("-") for row in rows))

    def work(group):
        group.on_one_host = True
        feedback = Feedback(read_compression("int8"), params, 2, group)
        entries = [ReducedTensor(p, None, name) for name, p in params.items()]
        reducer, found = Reducer(group, 2, entries, overlap=False, feedback=feedback), []
        for compresses in (False, True, True):
            reducer.begin(compresses)
            reducer.add([torch.ones_like(p) for p in params.values()])
            means = reducer.finish()
            assert all(torch.equal(mean, torch.ones_like(mean)) for mean in means)
            reducer.commit()
            del means
            group.barrier()
            found.append(shared_bytes())
            group.barrier()
        assert len(group.on_abort) == len(group.on_cut) == 1  # of the bias
        return found

    for before, *after in in_threads(2, work):
        assert before > plain > 1e5 > max(after) > 0
