"""The order of an epoch: a permutation, computed position by position."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.data.order import lane_positions, sample_ids


@pytest.mark.parametrize("lengths", [range(1, 101), range(101, 201), (255, 256, 257, 1023, 4097, 60_000)])
def test_every_epoch_is_a_permutation(lengths) -> None:
    for length in lengths:
        ids = sample_ids(3, 1, torch.arange(length), length)
        assert torch.equal(ids.sort().values, torch.arange(length)), length


def test_seed_and_epoch_change_the_order() -> None:
    positions = torch.arange(500)
    orders = [sample_ids(seed, epoch, positions, 500) for seed in range(3) for epoch in range(3)]
    for a, b in itertools.combinations(orders, 2):
        assert int((a == b).sum()) < 20


def test_the_same_keys_give_the_same_order() -> None:
    first = [32, 42, 85, 30, 67, 33, 21, 61]  # another order is another run
    assert sample_ids(0, 0, torch.arange(8), 100).tolist() == first


def test_an_id_depends_on_its_position_alone() -> None:
    whole = sample_ids(7, 2, torch.arange(1000), 1000)
    some = torch.randperm(1000, generator=torch.Generator().manual_seed(0))[:137]
    assert torch.equal(sample_ids(7, 2, some, 1000), whole[some])
    assert int(sample_ids(7, 2, torch.tensor([999]), 1000)) == int(whole[999])


def test_the_positions_are_left_alone() -> None:
    positions = torch.arange(50)
    sample_ids(0, 0, positions, 50)
    assert torch.equal(positions, torch.arange(50))


def test_a_sample_comes_to_every_position() -> None:
    """Over many epochs, sample 0 of 10 stands at every place about equally often."""
    places = [int((sample_ids(0, e, torch.arange(10), 10) == 0).nonzero()) for e in range(600)]
    counts = torch.bincount(torch.tensor(places), minlength=10)
    assert int(counts.min()) > 35
    assert int(counts.max()) < 90


def test_neighbours_are_torn_apart() -> None:
    ids = sample_ids(0, 0, torch.arange(10_000), 10_000)
    assert float(((ids[1:] - ids[:-1]).abs() == 1).float().mean()) < 0.001


@pytest.mark.parametrize(("batch", "lanes"), [(8, 1), (8, 2), (8, 8), (24, 4)])
def test_sample_j_of_a_batch_is_in_lane_j_mod_v(batch: int, lanes: int) -> None:
    table = lane_positions(3, batch, lanes)
    assert tuple(table.shape) == (lanes, batch // lanes)
    for j in range(batch):
        assert int(table[j % lanes, j // lanes]) == 3 * batch + j


@given(st.integers(1, 3000), st.integers(1, 40), st.integers(0, 5))
def test_blocks_are_a_permutation_of_neighbours(length: int, block: int, epoch: int) -> None:
    ids = sample_ids(3, epoch, torch.arange(length), length, block)
    assert sorted(ids.tolist()) == list(range(length))
    part = torch.arange(length // 3, length // 2 + 1)
    assert sample_ids(3, epoch, part, length, block).equal(ids[part])


def test_a_window_reads_whole_blocks() -> None:
    length, block = 64_000, 100
    ids = sample_ids(0, 0, torch.arange(length), length, block)
    for window in ids.view(-1, 16 * block):
        assert len((window // block).unique()) == 16 and not window.sort().values.equal(window)
    blocks = (ids.view(-1, 16 * block) // block).float().mean(1)  # of all parts of the set
    assert blocks.std() < 150
    other = sample_ids(0, 1, torch.arange(length), length, block)
    assert (other != ids).float().mean() > 0.99


def test_a_block_may_be_larger_than_the_set() -> None:
    ids = sample_ids(0, 0, torch.arange(53), 53, 1_000_000)
    assert sorted(ids.tolist()) == list(range(53)) and ids.tolist() != list(range(53))
