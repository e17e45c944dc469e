"""A published set, or a data set in Python, as a source of packs: its samples are pixels."""

from __future__ import annotations

import json
import threading
from typing import Any

import numpy as np
import torch

from lockstep.data.class_labels import read_labels
from lockstep.data.decoding.decode import Pixels
from lockstep.data.map_style import from_map_style
from lockstep.data.own.mapped_split import MappedSplit
from lockstep.data.pack.packable import Packable, PackableSplit, digest_lines
from lockstep.data.store import Split, Store
from lockstep.errors import DataError


def pack_store(data: Any) -> Packable:
    """A store, or data as `lockstep.train` takes it."""
    store = data if isinstance(data, Store) else from_map_style(data)
    if store.has_values:
        raise DataError(f"{store.name}: its images have rows of values: a pack holds one class for each")
    channels, height, width = store.shape
    first = store.train.read(torch.tensor([0]))[0]
    if first.dtype != torch.uint8:
        raise DataError(f"{store.name}: images are {first.dtype}: a pack holds bytes; give them as uint8")
    identity = digest_lines([json.dumps(store.facts(), sort_keys=True)])
    parts = {"train": store.train, **store.eval_splits()}
    is_own = isinstance(store.train, MappedSplit)  # a data set of the user's has no statistics
    return Packable(
        classes=store.classes,
        splits={name: _split(store, name, part) for name, part in parts.items()},
        identity=identity,
        state=identity,
        pixels=(height, width, channels),
        mean=None if is_own else store.mean,
        std=None if is_own else store.std,
    )


def _split(store: Store, name: str, split: Split) -> PackableSplit:
    lock = threading.Lock()  # a data set need not expect several threads

    def read(i: int) -> Pixels:
        with lock:
            image = split.read(torch.tensor([i]))[0][0]
        return image.permute(1, 2, 0).contiguous().numpy()

    return PackableSplit(
        labels=read_labels(split).numpy().astype(np.int64),
        names=[str(i) for i in range(len(split))],
        read=read,
        where=lambda i: f"{store.name} {name}[{i}]",
        num_bytes=len(split) * int(np.prod(store.shape)),
    )
