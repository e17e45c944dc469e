"""The loader: every position once an epoch, in the right lane, from any cursor, by either path."""

import threading
from collections import Counter

import pytest
import torch
from torch import Tensor

from lockstep.comm.tree import worker_lanes
from lockstep.data.augment import Augment
from lockstep.data.loader import Lanes, TrainLoader, eval_blocks
from lockstep.data.order import sample_ids
from lockstep.data.store import MemorySplit

CPU = torch.device("cpu")
LENGTH, BATCH, LANES = 53, 8, 4


def memory_split(length: int = LENGTH) -> MemorySplit:
    """A sample's label is its id."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (length, 3, 6, 6), dtype=torch.uint8, generator=generator)
    return MemorySplit(images, torch.arange(length))


class FileSplit:
    """A split that is not in memory, as files are; it can break at one sample."""

    def __init__(self, broken: int | None = None) -> None:
        self._inner, self._broken = memory_split(), broken
        self.threads: set[str] = set()

    def __len__(self) -> int:
        return len(self._inner)

    def read(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        self.threads.add(threading.current_thread().name)
        if self._broken in ids.tolist():
            raise OSError(f"sample {self._broken} is broken")
        return self._inner.read(ids)


def augment() -> Augment:
    return Augment.parse(["flip", "crop"], 9, 6, (0.5,) * 3, (0.2,) * 3)


def loader(split=None, **changed) -> TrainLoader:
    settings = {"batch": BATCH, "lanes": LANES, "device": CPU, **changed}
    return TrainLoader(split or memory_split(), augment(), **settings)


def equal(a: list[Lanes], b: list[Lanes]) -> bool:
    pairs = list(zip(a, b, strict=True))
    return all(torch.equal(x.images, y.images) and torch.equal(x.labels, y.labels) for x, y in pairs)


def test_the_last_part_of_an_epoch_is_dropped_and_the_rest_used_once() -> None:
    ids = sample_ids(9, 2, torch.arange(LENGTH), LENGTH)
    used = Counter(label for lanes in loader().epoch(2) for label in lanes.labels.tolist())
    assert len(loader()) == LENGTH // BATCH
    assert used == Counter(ids[: LENGTH // BATCH * BATCH].tolist())


def test_lane_holds_the_samples_of_its_stride() -> None:
    ids = sample_ids(9, 0, torch.arange(LENGTH), LENGTH)
    for step, lanes in enumerate(loader().epoch(0)):
        batch = ids[step * BATCH : (step + 1) * BATCH]
        for lane in range(LANES):
            assert torch.equal(lanes.lane(lane)[1], batch[lane::LANES])


def test_images_are_augmented_by_their_own_id() -> None:
    split = memory_split()
    lanes = next(loader(split).epoch(1))
    for image, sample in zip(lanes.images, lanes.labels, strict=True):
        ids = sample.view(1)
        assert torch.equal(image, augment().apply(split.images[ids], ids, 1)[0])


@pytest.mark.parametrize("split", [memory_split, FileSplit])
def test_an_epoch_goes_on_from_its_middle(split) -> None:
    whole = list(loader(split()).epoch(1))
    for first in range(len(whole) + 1):
        assert equal(list(loader(split()).epoch(1, first)), whole[first:])


def test_reading_ahead_changes_no_bit() -> None:
    split = FileSplit()
    assert equal(list(loader(split).epoch(3)), list(loader().epoch(3)))
    assert any(name.startswith("lockstep-read") for name in split.threads)


def test_lanes_do_not_depend_on_their_number() -> None:
    """The batch of a step is the same set of samples, however many lanes share it."""
    for one, four in zip(loader(lanes=1).epoch(0), loader(lanes=4).epoch(0), strict=True):
        assert sorted(one.labels.tolist()) == sorted(four.labels.tolist())


def test_an_error_in_reading_reaches_the_caller_at_its_step() -> None:
    ids = sample_ids(9, 0, torch.arange(LENGTH), LENGTH)
    steps = loader(FileSplit(broken=int(ids[2 * BATCH]))).epoch(0)
    next(steps)
    next(steps)
    with pytest.raises(OSError, match="is broken"):
        next(steps)


def test_an_epoch_left_early_leaves_no_thread() -> None:
    steps = loader(FileSplit()).epoch(0)
    next(steps)
    steps.close()
    assert not any(thread.name.startswith("lockstep-read") for thread in threading.enumerate())


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_images_lie_in_the_memory_format_asked_for(memory_format: torch.memory_format) -> None:
    lanes = next(loader(memory_format=memory_format).epoch(0))
    assert lanes.images.is_contiguous(memory_format=memory_format)
    assert lanes.lane(1)[0].is_contiguous(memory_format=memory_format)
    assert torch.equal(lanes.images, next(loader().epoch(0)).images)


def test_every_lane_is_aligned_as_if_it_were_alone() -> None:
    lanes = Lanes(torch.rand(12, 1, 3, 3), torch.arange(12), 4)
    for lane in range(4):
        images, labels = lanes.lane(lane)
        assert images.data_ptr() % 64 == 0
        assert torch.equal(images, lanes.images[lane * 3 : lane * 3 + 3])
        assert labels.tolist() == [lane * 3, lane * 3 + 1, lane * 3 + 2]


@pytest.mark.parametrize(("length", "block"), [(8, 4), (9, 4), (3, 4), (5, 1)])
def test_evaluation_blocks_have_one_shape_and_every_sample_once(length: int, block: int) -> None:
    split = memory_split(length)
    seen = []
    for images, labels, real in eval_blocks(split, augment(), block, CPU):
        assert len(images) == len(labels) == block
        assert torch.equal(images[:real], augment().normalize(split.images[labels[:real]]))
        seen += labels[:real].tolist()
    assert seen == list(range(length))


class Recording:
    """A split that remembers what was read of it."""

    def __init__(self, split):
        self.split, self.seen = split, []

    def __len__(self):
        return len(self.split)

    def read(self, ids):
        self.seen += ids.tolist()
        return self.split.read(ids)


@pytest.mark.parametrize("workers", [1, 3, 4, 8])
def test_a_worker_reads_only_its_lanes_and_all_read_the_batch_once(workers):
    batch, lanes = 16, 8
    split = memory_split(40)
    whole = TrainLoader(split, augment(), batch=batch, lanes=lanes, device=CPU)
    (step, *_) = whole.epoch(1)
    read = []
    for rank in range(workers):
        own, recording = worker_lanes(lanes, workers, rank), Recording(split)
        loader = TrainLoader(recording, augment(), batch=batch, lanes=lanes, own=own, device=CPU)
        (part, *others) = loader.epoch(1)
        assert len(recording.seen) == (1 + len(others)) * len(own) * batch // lanes
        read += part.labels.tolist()
        assert (part.first, part.num_lanes) == (own.start, len(own))
        for number, lane in enumerate(own):
            assert all(map(torch.equal, part.lane(number), step.lane(lane)))
    assert read == step.labels.tolist()
