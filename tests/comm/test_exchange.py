"""The exchange by messages and by collectives against the tree computed directly, and when a worker dies."""

import os
import signal
import sys
import threading
import time

import pytest
import torch
from comm.test_cut import meet
from comm.test_reducer import expected_mean
from comm.test_tree import rows
from forked import Forked
from world import in_threads

from lockstep.comm import exchange as module
from lockstep.comm.exchange import CollectiveExchange, Exchange, ExchangeShape
from lockstep.comm.transport import Round
from lockstep.comm.tree import LaneTree, subtrees, worker_lanes
from lockstep.errors import GroupLost

pytestmark = pytest.mark.gloo
CPU, LANES = torch.device("cpu"), 8


def shape_of(workers, length, wire=None):
    heights = [[height for _, height in subtrees(worker_lanes(LANES, workers, r))] for r in range(workers)]
    return ExchangeShape(heights, length, torch.float32, wire, CPU)


def fill(exchange, lanes, own, wire):
    """Sum a worker's own lanes into the roots."""
    tree = LaneTree(own.start, wire)
    for lane in own:
        tree.add([lanes[lane].clone()])
    for root, (_, _, (total,)) in zip(exchange.roots, tree.roots(), strict=True):
        root[: len(total)].copy_(total)


@pytest.mark.parametrize("kind", [Exchange, CollectiveExchange])
@pytest.mark.parametrize("wire", [None, torch.bfloat16])
@pytest.mark.parametrize(
    ("workers", "length"), [(1, 9), (2, 1), (2, 1001), (3, 2), (3, 1000), (5, 517), (8, 64)]
)
def test_any_workers_lengths_and_wire_types_give_the_bits_of_the_tree(
    kind, wire, workers, length, monkeypatch
):
    monkeypatch.setattr(module, "_CHUNK", 100)  # no length is a multiple of it
    steps = [rows(LANES, length, seed) for seed in range(3)]

    def work(group):
        exchange, found = kind(group, shape_of(workers, length, wire)), []
        for lanes in steps:  # buffers are used again
            fill(exchange, lanes, worker_lanes(LANES, workers, group.rank), wire)
            exchange.run()
            found.append(exchange.result[:length].clone())
        return found

    for found in in_threads(workers, work):
        for lanes, mean in zip(steps, found, strict=True):
            assert torch.equal(mean, expected_mean(list(lanes), wire))


def test_messages_between_two_workers_arrive_in_their_order():
    def work(group):
        other, outputs = 1 - group.rank, [torch.zeros(3) for _ in range(20)]
        received = [(other, output) for output in outputs]
        sent = [(other, torch.full((3,), 100.0 * group.rank + number)) for number in range(20)]
        group.swap(Round(received[:9], sent[:9]), lambda: None, Round(received[9:], sent[9:]))
        return [float(output[0]) for output in outputs]

    assert in_threads(2, work) == [[100.0 + n for n in range(20)], [float(n) for n in range(20)]]


def test_an_error_of_this_worker_is_not_taken_for_a_lost_one():
    def fail():
        raise RuntimeError("no memory")

    def work(group):
        with pytest.raises(RuntimeError, match="no memory"):
            group.swap(Round(), fail, Round())

    in_threads(2, work)
    in_threads(1, work)


LONG = 1 << 25  # elements: an exchange takes some hundred milliseconds


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_who_exchanges_with_a_worker_that_is_lost_half_way_leaves_and_nothing_arrives_later(how, tmp_path):
    path = str(tmp_path / "store")
    with Forked([sys.executable, __file__, path]) as other:
        group, cut_at = meet(path, 0), []
        exchange = Exchange(group, shape_of(2, LONG))

        def lose_and_cut():
            time.sleep(0.15)
            other.send_signal(how)
            time.sleep(0.3)
            cut_at.append(time.monotonic())
            group.cut()

        cutter = threading.Thread(target=lose_and_cut)
        cutter.start()
        try:
            with pytest.raises(GroupLost, match=r"lost contact|another generation"):
                while True:
                    exchange.run()
            left_at = time.monotonic()
            cutter.join()
            assert left_at - cut_at[0] < 2
            other.send_signal(signal.SIGCONT)
            buffers = [exchange._rows[1], exchange._means, exchange._sent]
            kept = [buffer.clone() for buffer in buffers]
            time.sleep(0.3)
            assert all(map(torch.equal, buffers, kept))
            group.abort()
        finally:
            other.kill()


if __name__ == "__main__":
    theirs = Exchange(meet(sys.argv[1], 1), shape_of(2, LONG))
    while os.getppid() != 1:
        theirs.run()
