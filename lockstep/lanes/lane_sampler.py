"""A batch sampler whose order does not depend on the number of workers, and that resumes by two integers."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler

from lockstep.comm.tree import worker_lanes
from lockstep.data.order import lane_positions, sample_ids
from lockstep.errors import SpecError


class LaneSampler(Sampler[list[int]]):
    """Yields the sample numbers of one lane after another: this worker's lanes of every step of an epoch.

    Give it to a DataLoader as `batch_sampler`. Each list is one lane, `batch // lanes` samples. The position
    is `epoch` and `step`, which can be set at any time; iterating starts there. The samples after the last
    whole batch of an epoch are left out. Seed, epoch and position alone decide the order.
    """

    def __init__(
        self,
        length: int,
        *,
        batch: int,
        lanes: int,
        seed: int = 0,
        shuffle: bool = True,
        workers: int = 1,
        rank: int = 0,
    ) -> None:
        check_lanes(lanes)
        if batch < lanes or batch % lanes:
            raise SpecError(
                f"batch={batch} must be a multiple of lanes={lanes}: lanes are equal parts of a batch"
            )
        if length < batch:
            raise SpecError(
                f"batch={batch} is more than the {length} samples of the data set: lower the batch"
            )
        if not 0 <= rank < workers <= lanes:
            raise SpecError(
                f"worker {rank} of {workers} with lanes={lanes}: every worker needs a lane of its own"
            )
        self._length, self._batch, self._lanes = length, batch, lanes
        self._seed, self._shuffle = seed, shuffle
        self.own = worker_lanes(lanes, workers, rank)  # this worker's lanes
        self.epoch = self.step = 0

    @property
    def steps(self) -> int:
        """Steps in an epoch."""
        return self._length // self._batch

    def __len__(self) -> int:
        """Lanes of this worker that are left in the epoch."""
        return (self.steps - self.step) * len(self.own)

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(self.step, self.steps):
            for lane in self.own:
                yield self.lane(step, lane)

    def lane(self, step: int, lane: int) -> list[int]:
        """The sample numbers of one lane of one step of the epoch."""
        positions = lane_positions(step, self._batch, self._lanes)[lane]
        ids = positions
        if self._shuffle:
            ids = sample_ids(self._seed, self.epoch, positions, self._length)
        numbers: list[int] = ids.to(torch.int64).tolist()
        return numbers


def check_lanes(lanes: int) -> None:
    """Refuse a number of lanes that no balanced tree has."""
    if type(lanes) is not int or lanes < 1 or lanes & (lanes - 1):
        raise SpecError(f"lanes={lanes} must be a power of two: 1, 2, 4, 8, …")
