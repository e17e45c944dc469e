"""The labels of a whole split, and weights of classes by how many samples each has."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lockstep.data.store import Split, Store

_AT_ONCE = 1024


def read_labels(split: Split) -> Tensor:
    """The label of every sample; they are read with their images where a split has no list of them."""
    listed: Any = getattr(split, "labels", None)
    if listed is None:
        return torch.cat([split.read(ids)[1] for ids in torch.split(torch.arange(len(split)), _AT_ONCE)])
    found: Tensor = listed() if callable(listed) else listed
    return found


def balanced_weights(store: Store) -> tuple[float, ...]:
    """A weight for each class, so that all classes count as much: the mean of them over samples is 1."""
    counts = torch.bincount(read_labels(store.train), minlength=len(store.classes)).tolist()
    there = sum(count > 0 for count in counts)
    return tuple(len(store.train) / (there * count) if count else 0.0 for count in counts)
