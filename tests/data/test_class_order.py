"""`data.order=balanced`: every class as often as any other, every sample before one comes again."""

from collections import Counter

import pytest
import torch

from lockstep.data.order import ClassOrder, lane_positions

SIZES = {0: 50, 2: 7, 3: 1, 5: 29}  # samples of each class; there are none of 1 and 4
LENGTH = sum(SIZES.values())


def order(seed=3):
    labels = torch.tensor([label for label, size in SIZES.items() for _ in range(size)])
    mixed = labels[torch.randperm(LENGTH, generator=torch.Generator().manual_seed(1))]
    return ClassOrder(seed, mixed)


def epoch(number, seed=3):
    return order(seed).ids(number, torch.arange(LENGTH))


def test_every_class_is_as_often_there():
    made = order()
    for number in range(5):
        ids = made.ids(number, torch.arange(LENGTH))
        counts = Counter(made.labels[ids % LENGTH].tolist())
        assert counts.keys() == SIZES.keys() and max(counts.values()) - min(counts.values()) <= 1
        rows = made.labels[ids % LENGTH][: LENGTH // 4 * 4].view(-1, 4)
        assert all(sorted(row) == sorted(SIZES) for row in rows.tolist())
        assert len({tuple(row) for row in rows.tolist()}) > 4  # else a lane could have one class alone


def test_all_samples_of_a_class_come_before_one_comes_again():
    made, seen = order(), Counter()
    per_epoch = -(-LENGTH // len(SIZES))
    for number in range(8):
        ids = made.ids(number, torch.arange(LENGTH))
        assert len(ids.unique()) == LENGTH  # a sample that comes again has another number
        seen.update((ids % LENGTH).tolist())
    for label, size in SIZES.items():
        times = [seen[i] for i in torch.nonzero(made.labels == label).flatten().tolist()]
        expected = 8 * per_epoch / size
        assert min(times) >= int(expected) - 2 and max(times) <= int(expected) + 2, label
        assert min(times) > 0


def test_it_is_a_function_of_seed_epoch_and_position():
    whole = epoch(4)
    for lanes in (range(2), range(2, 3), range(3, 8)):
        some = lane_positions(3, 16, 8)[lanes.start : lanes.stop].flatten()
        assert torch.equal(order().ids(4, some), whole[some])
    assert not torch.equal(whole, epoch(5)) and not torch.equal(whole, epoch(4, seed=4))


@pytest.mark.parametrize("sizes", [(1, 1), (1, 100_000), (4096, 4096)])
def test_it_is_quick_whatever_the_sizes(sizes):
    labels = torch.cat([torch.full((size,), label) for label, size in enumerate(sizes)])
    ids = ClassOrder(0, labels).ids(1, torch.arange(len(labels)))
    assert torch.bincount(labels[ids % len(labels)]).tolist() == [len(labels) // 2 + len(labels) % 2] * 2 or (
        abs(int(torch.bincount(labels[ids % len(labels)]).diff())) <= 1
    )
