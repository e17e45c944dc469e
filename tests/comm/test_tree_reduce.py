"""The tree over a process group of the user's own gives the same bits for any number of workers."""

import threading

import pytest
import torch
import torch.distributed as dist

from lockstep.comm.tree_reduce import TreeReduce
from lockstep.errors import SpecError

LANES = [torch.randn(5, 7, generator=torch.Generator().manual_seed(lane)) for lane in range(8)]


def gloo(workers):
    """A process group for each of several workers, which are threads here."""
    store, made = dist.HashStore(), [None] * workers

    def make(rank):
        group = dist.ProcessGroupGloo(store, rank, workers, options())
        made[rank] = group

    def options():
        found = dist.ProcessGroupGloo._Options()
        found._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        return found

    in_threads(workers, make)
    return made


def in_threads(workers, work):
    threads = [threading.Thread(target=work, args=[rank]) for rank in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.parametrize("workers", [2, 3, 8])
def test_any_number_of_workers_gives_the_bits_of_one(workers, monkeypatch):
    monkeypatch.setattr(dist, "get_backend", lambda group: "gloo")  # a bare group is not registered
    expected = TreeReduce(LANES[0], 8).all_reduce(LANES)
    groups, found = gloo(workers), {}

    def work(rank):
        tree = TreeReduce(LANES[0], 8, groups[rank])
        own = [LANES[lane] for lane in tree.own]
        found[rank] = tree.all_reduce(own), tree.all_gather(tree.reduce_scatter(own))

    in_threads(workers, work)
    for whole, gathered in found.values():
        assert torch.equal(whole, expected) and torch.equal(gathered, expected)
    assert torch.allclose(expected, torch.stack(LANES).double().mean(0).float())


def test_what_cannot_be_is_refused():
    with pytest.raises(SpecError, match="power of two"):
        TreeReduce(LANES[0], 6)
    with pytest.raises(SpecError, match="3 tensors for the 8 lanes"):
        TreeReduce(LANES[0], 8).all_reduce(LANES[:3])
