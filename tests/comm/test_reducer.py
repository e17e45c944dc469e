"""The reduction over workers against the tree computed directly, bit for bit."""

import itertools

import pytest
import torch
from comm.test_tree import recursive_sum, rows
from hypothesis import given, settings
from hypothesis import strategies as st
from world import in_threads

from lockstep.comm.bucket import ReducedTensor, split
from lockstep.comm.reducer import Reducer
from lockstep.comm.tree import LaneTree, subtrees, worker_lanes

SHAPES = [(), (1,), (7,), (3, 5), (2, 3, 3, 3), (70,), (0,), (300, 11)]


def rounded_sum(values):
    """The tree with every node rounded to bf16."""

    def node(part):
        total = part[0] if len(part) == 1 else node(part[: len(part) // 2]) + node(part[len(part) // 2 :])
        return total.bfloat16().float()

    return node(values)


def expected_mean(lanes, wire):
    total = rounded_sum(lanes) if wire else recursive_sum(lanes)
    mean = total * (1.0 / len(lanes))
    return mean.bfloat16().float() if wire else mean


def reduce_in(group, columns, num_lanes, wires, overlap, bucket_mb, together):
    """Two steps of one worker: lane by lane, or a subtree at a time; the last one put piece by piece."""
    entries = [ReducedTensor(column[0], wire) for column, wire in zip(columns, wires, strict=True)]
    reducer = Reducer(group, num_lanes, entries, bucket_mb, overlap)
    own = worker_lanes(num_lanes, group.size, group.rank)
    for _ in range(2):  # buffers are used again
        reducer.begin()
        passes = subtrees(own) if together else [(lane, 0) for lane in own]
        for first, height in passes:
            tree = LaneTree()
            for lane in range(first, first + (1 << height)):
                tree.add([column[lane].clone() for column in columns])
            leaf = tree.root()[1]
            if reducer.overlaps and first == passes[-1][0]:
                for index in range(0, len(leaf), 2):  # some come early, the rest at the end
                    reducer.put(index, leaf[index])
            reducer.add(leaf, height)
        means = [mean.clone() for mean in reducer.finish()]
    reducer.close()
    return means


@pytest.mark.gloo
@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_workers_lanes_sizes_and_buckets(data):
    height = data.draw(st.integers(0, 4), "height")
    workers = data.draw(st.integers(1, min(1 << height, 6)), "workers")
    shapes = data.draw(st.lists(st.sampled_from(SHAPES), min_size=1, max_size=5), "shapes")
    wires = [data.draw(st.sampled_from([None, torch.bfloat16])) for _ in shapes]
    together = data.draw(st.booleans(), "together") and not any(wires)
    options = {
        "overlap": data.draw(st.booleans(), "overlap"),
        "bucket_mb": data.draw(st.sampled_from([1e-6, 1e-4, 1e-3, 25.0]), "bucket"),
        "together": together,
    }
    seed, one_host = data.draw(st.integers(0, 2**32), "seed"), data.draw(st.booleans(), "one host")
    columns = [
        rows(1 << height, max(torch.Size(shape).numel(), 1), seed + i)[
            :, : torch.Size(shape).numel()
        ].reshape(1 << height, *shape)
        for i, shape in enumerate(shapes)
    ]

    def work(group):
        group.on_one_host = one_host
        return reduce_in(group, columns, 1 << height, wires, **options)

    for means in in_threads(workers, work):
        for column, wire, mean in zip(columns, wires, means, strict=True):
            assert torch.equal(mean, expected_mean(list(column), wire)), (mean.shape, wire)


@given(st.integers(0, 7), st.data())
def test_workers_own_every_lane_once_as_even_as_possible(height, data):
    lanes = 1 << height
    workers = data.draw(st.integers(1, lanes))
    owned = [worker_lanes(lanes, workers, rank) for rank in range(workers)]
    assert [lane for own in owned for lane in own] == list(range(lanes))
    assert max(map(len, owned)) - min(map(len, owned)) <= 1


@given(st.integers(0, 300), st.integers(0, 70))
def test_subtrees_are_aligned_maximal_and_whole(first, count):
    found = subtrees(range(first, first + count))
    covered = [lane for start, height in found for lane in range(start, start + (1 << height))]
    assert covered == list(range(first, first + count))
    assert all(start % (1 << height) == 0 for start, height in found)
    for (start, height), (_, following) in itertools.pairwise(found):
        assert height != following or start % (2 << height) != 0, "two halves of one subtree were left apart"


@given(st.lists(st.tuples(st.integers(0, 3000), st.booleans(), st.booleans()), min_size=1, max_size=20))
def test_buckets_hold_neighbours_of_one_kind_up_to_their_size(items):
    entries = [
        ReducedTensor(
            torch.zeros(size, dtype=torch.float64 if double else torch.float32),
            torch.bfloat16 if wire else None,
        )
        for size, double, wire in items
    ]
    buckets = split(entries, 4000)
    assert [index for bucket in buckets for index in bucket] == list(range(len(entries)))
    for bucket in buckets:
        assert len({entries[index].kind() for index in bucket}) == 1
        assert len(bucket) == 1 or sum(entries[index].num_bytes for index in bucket) <= 4000


def test_channels_last_tensors_keep_their_layout_and_bits():
    columns = [rows(4, 2 * 3 * 4 * 4, 1).view(4, 2, 3, 4, 4).to(memory_format=torch.channels_last_3d)]
    columns[0] = torch.stack([c.contiguous(memory_format=torch.channels_last) for c in columns[0]])
    lanes = [lane.contiguous(memory_format=torch.channels_last) for lane in columns[0]]

    def work(group):
        reducer = Reducer(group, 4, [ReducedTensor(lanes[0])])
        reducer.begin()
        for lane in worker_lanes(4, group.size, group.rank):
            reducer.add([lanes[lane].clone(memory_format=torch.preserve_format)])
        (mean,) = reducer.finish()
        reducer.close()
        return mean.clone(memory_format=torch.preserve_format)

    for mean in in_threads(3, work):
        assert torch.equal(mean, recursive_sum(lanes) * 0.25)
        assert mean.is_contiguous(memory_format=torch.channels_last)


def test_a_step_that_broke_off_is_started_again():
    values = rows(4, 9, 3)

    def work(group):
        reducer = Reducer(group, 4, [ReducedTensor(values[0])], overlap=False)
        own = worker_lanes(4, group.size, group.rank)
        reducer.begin()
        reducer.add([torch.full_like(values[0], 7.0)])
        reducer.begin()
        for lane in own:
            reducer.add([values[lane].clone()])
        return reducer.finish()[0].clone()

    for mean in in_threads(2, work):
        assert torch.equal(mean, recursive_sum(list(values)) * 0.25)
