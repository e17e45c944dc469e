"""Holds out validation images of a published set's training images, which are then not trained on."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from lockstep.data.store import MemorySplit, Store
from lockstep.errors import DataError
from lockstep.kernels import random


@dataclass(frozen=True)
class HoldOut:
    """What a user may set under `data.` for a published set: none are held out by default."""

    val_fraction: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.val_fraction < 1:
            raise DataError(
                f"data.val_fraction={self.val_fraction}: must be at least 0 and below 1, such as 0.1"
            )

    def apply(self, store: Store) -> Store:
        """The same store with `val`: training images whose hashed number is below the fraction."""
        if not self.val_fraction:
            return store
        train = store.train
        assert isinstance(train, MemorySplit), "published sets are held in memory"
        drawn = random.uniform(random.key("val", self.seed, store.name), torch.arange(len(train)))
        held = drawn < self.val_fraction
        held[drawn.argmin()], held[drawn.argmax()] = True, False  # at least one on each side
        kept, val = (MemorySplit(train.images[part], train.labels[part]) for part in (~held, held))
        told = {"val_fraction": self.val_fraction, "val_seed": self.seed}
        counts = {"num_train": len(kept), "num_val": len(val)}
        return replace(store, train=kept, val=val, manifest={**store.manifest, **counts, **told})
