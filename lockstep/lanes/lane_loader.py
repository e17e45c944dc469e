"""The loader of a user's own loop: reads this worker's lanes of each batch, in a fixed order.

Samples can be read ahead by processes of their own. Before each sample is read, all generators are seeded by
its number and the epoch, so a data set's random augmentations are the same wherever they are computed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lockstep.errors import DataError
from lockstep.kernels.keyed_seed import seed_all
from lockstep.kernels.structure import place
from lockstep.lanes.lane_sampler import LaneSampler
from lockstep.lanes.script import Script
from lockstep.measure.hidden_state import own_generators

_CPU = torch.device("cpu")


class LaneLoader:
    """Yields batches; iterate over each one inside `session.step()` to get its lanes."""

    def __init__(
        self,
        script: Script,
        dataset: Any,
        batch: int,
        *,
        shuffle: bool = True,
        collate: Callable[[list[Any]], Any] | None = None,
        processes: int = 0,
    ) -> None:
        self._script, self._dataset, self._collate = script, dataset, collate
        self._batch, self._shuffle, self._processes = batch, shuffle, processes
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise DataError(
                f"session.loader: {type(dataset).__name__} lacks __len__ or __getitem__, so its samples have "
                "no numbers: give a map-style data set"
            )
        for text in own_generators("session.loader", dataset):
            warnings.warn(text, stacklevel=3)
        self._steps = self._sampler(1, 0).steps  # refuses a wrong batch now, and not in the first epoch
        self._at: tuple[int, int, range] | None = None  # (epoch, batch, lanes) that comes next from `_lanes`
        self._lanes: Iterator[Any] = iter(())

    def __len__(self) -> int:
        """Batches in an epoch; the samples after the last whole batch are left out."""
        return self._steps

    def __iter__(self) -> Iterator[GlobalBatch]:
        epoch, data = self._script.progress.epoch, f"{len(self._dataset)} samples in batches of {self._batch}"
        for number in self._script.progress.batches(len(self), data):
            yield GlobalBatch(self, epoch, number)
        self._at = None  # its processes are not needed any more
        self._lanes = iter(())

    def read(self, epoch: int, number: int, workers: int, rank: int) -> list[Any]:
        """A worker's lanes of one batch, on the session's device."""
        sampler = self._sampler(workers, rank)
        if self._at != (epoch, number, sampler.own):
            self._lanes = self._start(sampler, epoch, number)
        found = [place(next(self._lanes), self._script.device) for _ in sampler.own]
        self._at = epoch, number + 1, sampler.own
        return found

    def read_lane(self, epoch: int, number: int, lane: int) -> Any:
        """One lane of a batch, whoever owns it."""
        sampler = self._sampler(1, 0)
        sampler.epoch = epoch
        keyed = KeyedSamples(self._dataset, self._script.seed, epoch)
        collate = self._collate or torch.utils.data.default_collate
        return place(collate(keyed.__getitems__(sampler.lane(number, lane))), self._script.device)

    def _sampler(self, workers: int, rank: int) -> LaneSampler:
        script = self._script
        return LaneSampler(
            len(self._dataset),
            batch=self._batch,
            lanes=script.lanes,
            seed=script.seed,
            shuffle=self._shuffle,
            workers=workers,
            rank=rank,
        )

    def _start(self, sampler: LaneSampler, epoch: int, number: int) -> Iterator[Any]:
        sampler.epoch, sampler.step = epoch, number
        return iter(
            DataLoader(
                KeyedSamples(self._dataset, self._script.seed, epoch),
                batch_sampler=sampler,
                collate_fn=self._collate,
                num_workers=self._processes,
                generator=torch.Generator(),  # else it would draw from the script's generator
            )
        )


class GlobalBatch:
    """One global batch; iterating over it inside `session.step()` gives this worker's lanes, collated."""

    def __init__(self, loader: LaneLoader, epoch: int, number: int) -> None:
        self._loader, self.epoch, self.number = loader, epoch, number
        self._read: tuple[tuple[int, int], list[Any]] | None = None

    def __iter__(self) -> Iterator[Any]:
        return self._loader._script.lanes_of(self)

    def read(self, workers: int, rank: int) -> list[Any]:
        """This worker's lanes; they are read once, also if a script takes several steps with one batch."""
        if self._read is None or self._read[0] != (workers, rank):
            self._read = (workers, rank), self._loader.read(self.epoch, self.number, workers, rank)
        return self._read[1]

    def read_lane(self, lane: int) -> Any:
        """One lane, whoever owns it."""
        return self._loader.read_lane(self.epoch, self.number, lane)


class KeyedSamples(Dataset[Any]):
    """A data set whose samples are read with all generators seeded by epoch and number."""

    def __init__(self, dataset: Any, seed: int, epoch: int) -> None:
        self._dataset, self._seed, self._epoch = dataset, seed, epoch

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, number: int) -> Any:
        self._seed_for(number)
        return self._dataset[number]

    def __getitems__(self, numbers: list[int]) -> list[Any]:
        """The samples of a lane, as a `DataLoader` asks for them."""
        if type(self._dataset) is not TensorDataset:
            return [self[number] for number in numbers]
        self._seed_for(numbers[-1])  # such a data set draws nothing: only `collate` might
        return [self._dataset[number] for number in numbers]

    def _seed_for(self, number: int) -> None:
        seed_all(_CPU, "sample", self._seed, self._epoch, number)
