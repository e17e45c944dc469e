"""Memory between workers of a host, and its barrier."""

import random
import subprocess
import sys
import time

import pytest
import torch
from world import in_threads

from lockstep.comm import shared_memory as shared
from lockstep.comm.exchange import Exchange, ExchangeShape, SharedExchange, make_exchange
from lockstep.comm.shared_memory import share
from lockstep.errors import GroupLost

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
