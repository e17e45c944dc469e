"""Which samples are in which lane of a batch, in training and in evaluation."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from lockstep.errors import DataError
from lockstep.kernels.keyed_seed import seed_all
from lockstep.lanes.lane_sampler import LaneSampler

_CPU = torch.device("cpu")


class LaneOrder:
    """The order of samples in each epoch, as the loader's sampler has it.

    Samplers draw from generators that are seeded by the epoch, so all workers have the same order. A sample
    that a sampler gives twice in an epoch is augmented alike.
    """

    def __init__(self, loader: DataLoader[Any], seed: int) -> None:
        self._loader, self._seed = loader, seed
        self._numbers: list[int] | range = range(0)
        self.epoch = -1

    def begin(self, epoch: int) -> None:
        """Take the order of an epoch."""
        sampler, self.epoch = self._loader.sampler, epoch
        if type(sampler) is SequentialSampler:
            self._numbers = range(len(sampler))
            return
        seed_all(_CPU, "order", self._seed, epoch)
        self._numbers = [int(number) for number in sampler]


class TrainOrder(LaneOrder):
    """Batches of equal lanes; what is left of an epoch after the last whole batch is left out."""

    def __init__(self, loader: DataLoader[Any], lanes: int, seed: int) -> None:
        super().__init__(loader, seed)
        self._is_plain = is_plain_shuffle(loader)
        assert loader.batch_size is not None
        self._batch, length = loader.batch_size, len(loader.sampler)  # type: ignore[arg-type]
        self._count = loader.batch_size // lanes
        self._lanes = LaneSampler(length, batch=self._batch, lanes=lanes, seed=seed, shuffle=self._is_plain)
        self.steps = self._lanes.steps

    def begin(self, epoch: int) -> None:
        """Take the order of an epoch; a plain shuffle needs no list of it."""
        self.epoch = self._lanes.epoch = epoch
        if not self._is_plain:
            super().begin(epoch)

    def samples(self, step: int) -> int:
        """How many samples a batch has."""
        return self._batch

    def count(self, step: int, lane: int) -> int:
        """How many samples a lane has."""
        return self._count

    def lane(self, step: int, lane: int) -> list[int]:
        """The numbers of a lane's samples."""
        places = self._lanes.lane(step, lane)
        return places if self._is_plain else [self._numbers[place] for place in places]


class EvalOrder(LaneOrder):
    """Batches in `lanes` blocks as even as possible; every sample is in one of them, some may be empty.

    With each batch the blocks move on by one lane, so that also batches of one sample occupy all workers.
    """

    def __init__(self, loader: DataLoader[Any], lanes: int, seed: int) -> None:
        super().__init__(loader, seed)
        assert loader.batch_size is not None
        self._lanes, self._batch, self.steps = lanes, loader.batch_size, len(loader)

    def samples(self, step: int) -> int:
        """How many samples a batch has; the last one may have fewer."""
        return min(self._batch, len(self._numbers) - step * self._batch)

    def lane(self, step: int, lane: int) -> list[int]:
        """The numbers of a block's samples."""
        part = self._part(step, lane)
        return list(self._numbers[part.start : part.stop])

    def count(self, step: int, lane: int) -> int:
        """How many samples a block has."""
        return len(self._part(step, lane))

    def _part(self, step: int, lane: int) -> range:
        part, size, first = (lane - step) % self._lanes, self.samples(step), step * self._batch
        return range(first + part * size // self._lanes, first + (part + 1) * size // self._lanes)


def is_plain_shuffle(loader: DataLoader[Any]) -> bool:
    """Whether the loader shuffles as `shuffle=True` does."""
    sampler = loader.sampler
    plain = type(sampler) is RandomSampler and not sampler.replacement
    return plain and len(sampler) == len(loader.dataset)  # type: ignore[arg-type]


def check_loader(loader: object, stage: str) -> DataLoader[Any]:
    """Refuse loaders whose samples cannot be told apart by number."""
    if not isinstance(loader, DataLoader):
        raise DataError(f"the {stage} loader is a {type(loader).__name__}: give a torch DataLoader")
    if isinstance(loader.dataset, IterableDataset):
        raise DataError(
            f"the {stage} data set {type(loader.dataset).__name__} is an IterableDataset, whose samples have "
            "no numbers: give one with __getitem__ and __len__"
        )
    if loader.batch_size is None:
        raise DataError(
            f"the {stage} loader has a batch_sampler of its own, or batch_size=None: give batch_size, the "
            "size of the whole batch of all workers, and a sampler or shuffle"
        )
    sampler: Any = loader.sampler
    if isinstance(sampler, DistributedSampler):
        raise DataError(f"the {stage} loader has a DistributedSampler: leave it out, lanes take its place")
    if getattr(sampler, "generator", None) is not None and not is_plain_shuffle(loader):
        raise DataError(
            f"the {stage} loader's {type(sampler).__name__} has a generator of its own, which a checkpoint "
            "does not keep: leave `generator` out, the strategy's seed decides"
        )
    return loader
