"""Validation images held out of a published set: fixed by a hash, and the test images untouched."""

import pytest
import torch

from lockstep.data.hold_out import HoldOut
from lockstep.data.store import MemorySplit, Store
from lockstep.errors import DataError


def store(count=2000):
    train = MemorySplit(torch.arange(count).view(-1, 1, 1, 1), torch.arange(count) % 7)
    test = MemorySplit(torch.zeros(5, 1, 1, 1, dtype=torch.int64), torch.zeros(5, dtype=torch.int64))
    manifest = {"name": "some", "num_train": count, "num_test": 5, "content_sha256": "x"}
    return Store("some", ("a",) * 7, (1, 1, 1), train, test, (0.5,), (0.5,), manifest)


def test_every_training_image_is_on_one_side():
    whole = store()
    found = HoldOut(0.1).apply(whole)
    kept, held = found.train.images.flatten().tolist(), found.val.images.flatten().tolist()
    assert sorted(kept + held) == list(range(2000)) and 150 < len(held) < 250
    assert found.train.labels.tolist() == [i % 7 for i in kept] and found.test is whole.test
    assert found.chosen_by == ("val", found.val)
    assert (found.manifest["num_train"], found.manifest["num_val"]) == (len(kept), len(held))
    again, other = HoldOut(0.1).apply(store()), HoldOut(0.1, seed=1).apply(store())
    assert again.manifest == found.manifest and again.val.images.equal(found.val.images)
    assert not other.val.images[: len(held)].equal(found.val.images[: len(other.val)])


def test_nothing_is_held_out_by_default_and_never_all():
    whole = store()
    assert HoldOut().apply(whole) is whole
    for fraction in (1e-12, 0.9999999):
        found = HoldOut(fraction).apply(store(3))
        assert len(found.train) and len(found.val)
    with pytest.raises(DataError, match=r"data.val_fraction=1.0: must be at least 0 and below 1"):
        HoldOut(1.0)
