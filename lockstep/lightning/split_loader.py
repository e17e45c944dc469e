"""The loader that takes the place of the user's: reads this worker's lanes of each batch.

order → this loader → `LaneStrategy.batch_to_device` → step. It keeps the user's data set, `collate_fn`,
reading processes and pinned memory. Its place in an epoch is two integers, which go into checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from lockstep.errors import IdentityError
from lockstep.lanes.lane_loader import KeyedSamples
from lockstep.lightning.lane_batch import Lane, LaneBatch
from lockstep.lightning.lane_order import EvalOrder, TrainOrder

_KEPT = ["num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"]
_KEPT += ["prefetch_factor", "persistent_workers"]

Place = tuple[int, int]  # epoch and number of a sample


class SplitLoader:
    """Yields a `LaneBatch` for every batch; Lightning tells it the epoch, and saves and loads its place."""

    def __init__(
        self, source: DataLoader[Any], order: TrainOrder | EvalOrder, stage: str, own: range, seed: int
    ) -> None:
        self.dataset, self.batch_size = source.dataset, source.batch_size
        self._order, self._stage, self._own, self._seed = order, stage, own, seed
        self.sampler = self  # Lightning calls its `set_epoch`
        self._epoch = self._step = self._first = 0
        self._loaded: dict[str, int] = {}
        self._lanes = DataLoader(
            _PlacedSamples(source.dataset, seed),
            batch_sampler=_Reading(self),
            generator=torch.Generator(),  # else it would draw from the script's generator
            **{name: getattr(source, name) for name in _KEPT},
        )

    def __len__(self) -> int:
        """Batches in an epoch, whatever the number of workers."""
        return self._order.steps

    def set_epoch(self, epoch: int) -> None:
        """The epoch of the next iteration."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[LaneBatch]:
        """The batches of the epoch that is set when the first one is asked for; after a load, the rest."""
        loaded, self._loaded = self._loaded, {}
        self._first = loaded["step"] if loaded.get("epoch") == self._epoch else 0
        self._order.begin(self._epoch)
        lanes = iter(self._lanes)
        for step in range(self._first, len(self)):
            own = [(lane, self._order.count(step, lane)) for lane in self._own]
            read = [Lane(lane, samples, next(lanes)) for lane, samples in own if samples]
            self._step = step + 1
            yield LaneBatch(self._stage, self._epoch, step, self._order.samples(step), read)

    def places(self) -> Iterator[list[Place]]:
        """The samples of this worker's lanes that are left in the epoch, a list for each lane."""
        for step in range(self._first, len(self)):
            for lane in self._own:
                if numbers := self._order.lane(step, lane):
                    yield [(self._order.epoch, number) for number in numbers]

    def state_dict(self) -> dict[str, Any]:
        """The place, and what it is a place in."""
        return {"epoch": self._epoch, "step": self._step, **self._facts()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a place, by any number of workers."""
        for name, mine in self._facts().items():
            if state.get(name) != mine:
                raise IdentityError(
                    f"the checkpoint was trained with {name}={state.get(name)}, and now there is "
                    f"{name}={mine}: it would not end with the same bits"
                )
        self._loaded = {"epoch": int(state["epoch"]), "step": int(state["step"])}
        self._step = self._loaded["step"]

    def _facts(self) -> dict[str, Any]:
        return {"batch_size": self.batch_size, "seed": self._seed, "steps": len(self)}


class _Reading(Sampler[list[Place]]):
    """The loader's `places`, as the batch sampler of the loader that reads."""

    def __init__(self, loader: SplitLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[list[Place]]:
        return self._loader.places()


class _PlacedSamples(Dataset[Any]):
    """A data set by epoch and number; processes that read it need not start anew with each epoch."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset, self._seed = dataset, seed

    def __getitems__(self, places: list[Place]) -> list[Any]:
        """The samples of a lane, which are all of one epoch."""
        numbers = [number for _, number in places]
        return KeyedSamples(self._dataset, self._seed, places[0][0]).__getitems__(numbers)
