"""Makes a store of a user's map-style data set: an object with `len` that gives (image, target) by index.

Data pipeline of the Python API: store → order → augment → loader; this file makes the store.
Shapes: N images, C channels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from lockstep.data.own.mapped_split import MappedSplit
from lockstep.data.sample import is_mask, sample_bytes
from lockstep.data.store import Store
from lockstep.errors import DataError
from lockstep.kernels.random import integers, key
from lockstep.kernels.structure import describe

_NUM_HASHED = 64
_TENTH = 10  # one sample in ten is held out of a single data set


def from_map_style(
    data: Any,
    tell: Callable[[str], None] = lambda text: None,
    any_target: bool = False,
    values: bool = False,
) -> Store:
    """Make a store of a data set or of a pair (train, test); a Store is returned as it is.

    `tell` gets a message before work that takes long. With `any_target`, targets may be other than integers;
    then the store has no classes. With `values` they are numbers or rows of them.
    """
    if isinstance(data, Store):
        return data
    train, test = _split(data)
    if any_target:
        train, test = (replace(split, has_labels=train.is_labelled()) for split in (train, test))
    if values:
        train, test = (replace(split, has_labels=False) for split in (train, test))
    elif train.has_labels:
        train, test = _read_all(train, test, tell)
    first, target = train.item(0)
    channels, height, width = first.shape
    classes = _name_values(train, target) if values else _classes(train, test) if train.has_labels else ()
    unit = first.is_floating_point()  # floats are used as they are
    return Store(
        name=type(train.data).__name__,
        classes=classes,
        shape=(channels, height, width),
        train=train.expecting(first, target, len(classes)),
        test=test.expecting(first, target, len(classes)),
        mean=(0.0 if unit else 0.5,) * channels,
        std=(1.0 if unit else 0.25,) * channels,
        manifest={
            "name": "map-style",
            "type": f"{type(train.data).__module__}.{type(train.data).__qualname__}",
            "num_train": len(train),
            "num_test": len(test),
            "sample_sha256": _sample_sha256(train, test),
            **({} if train.has_labels else {"targets": describe(target)}),
        },
        has_masks=not train.has_labels and is_mask(target, height, width),
        has_values=values,
    )


def _split(data: Any) -> tuple[MappedSplit, MappedSplit]:
    """Train and test splits: the two of a pair, or one data set split by a hash of the sample's index."""
    if isinstance(data, tuple) and len(data) == 2:
        train, test = (
            MappedSplit(part, name, range(_length(part, name)))
            for part, name in zip(data, ("train", "test"), strict=True)
        )
        return train, test
    length = _length(data, "data")
    if length < 2:
        raise DataError("data: 1 sample cannot be split into train and test: give a pair (train, test)")
    held = integers(key("held out"), torch.arange(length), _TENTH) == 0
    if not held.any() or held.all():
        held[0], held[1:] = True, False
    train_indices, test_indices = (torch.nonzero(mask)[:, 0].tolist() for mask in (~held, held))
    return MappedSplit(data, "data", train_indices), MappedSplit(data, "data", test_indices)


def _length(data: Any, name: str) -> int:
    if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise DataError(
            f"{name}: {type(data).__name__} is no map-style data set: it needs __len__ and __getitem__ "
            "that gives (image, label)"
        )
    if len(data) == 0:
        raise DataError(f"{name}: {type(data).__name__} is empty: it needs at least one sample")
    return len(data)


def _name_values(train: MappedSplit, target: Any) -> tuple[str, ...]:
    """The data set's names of a target's values, from its `classes`; if it has none, their numbers."""
    if not isinstance(target, torch.Tensor) or target.dim() > 1:
        raise DataError(
            f"{train.where(0)}: its target is {describe(target)}: train.loss takes a number or a row of "
            "numbers; anything else needs a loss of yours, as loss="
        )
    names = getattr(train.data, "classes", None)
    if names is not None and len(names) != target.numel():
        raise DataError(
            f"{train.where(0)}: its target has {target.numel()} values, and `classes` of "
            f"{type(train.data).__name__} names {len(names)}: name each value"
        )
    return tuple(str(name) for name in (range(target.numel()) if names is None else names))


def _read_all(
    train: MappedSplit, test: MappedSplit, tell: Callable[[str], None]
) -> tuple[MappedSplit, MappedSplit]:
    """The splits, which know all their labels."""
    unlisted = sum(len(split) for split in (train, test) if split.listed_labels() is None)
    if unlisted:
        tell(
            f"reading {unlisted:,} samples of {type(train.data).__name__} for their labels, once: a list of "
            "them, as its attribute `targets`, saves this"
        )
    return replace(train, known=train.labels()), replace(test, known=test.labels())


def _classes(train: MappedSplit, test: MappedSplit) -> tuple[str, ...]:
    """The data set's class names; if it has none, the numbers from 0 to the largest label."""
    labels = [(split, split.labels()) for split in (train, test)]
    named = getattr(train.data, "classes", None)
    count = len(named) if named is not None else 1 + max(int(found.max()) for _, found in labels)
    images = len(train) + len(test)
    if named is None and count > images:
        raise DataError(
            f"{train.name}: label {count - 1} would mean {count} classes for {images} images: "
            "labels must count from 0; correct them, or name the classes in an attribute `classes`"
        )
    for split, found in labels:
        bad = (found < 0) | (found >= count)
        if bad.any():
            first = int(bad.int().argmax())
            last = f" to {count - 1}, the last of its `classes`" if named is not None else ""
            raise DataError(
                f"{split.where(first)}: label {int(found[first])} is out of range: labels must count from 0"
                f"{last}; correct them"
            )
    return tuple(str(name) for name in (named if named is not None else range(count)))


def _sample_sha256(*splits: MappedSplit) -> str:
    """A hash over at most 64 samples of each split, evenly spaced: enough to tell data sets apart.

    A sample that differs when it is read again is refused, since no run could be repeated.
    """
    digest, hashes = hashlib.sha256(), []
    places = [(split, i) for split in splits for i in _evenly(len(split))]
    for split, i in places:
        found = sample_bytes(*split.item(i))
        digest.update(found)
        hashes.append(hashlib.sha256(found).digest())
    for (split, i), known in zip(places, hashes, strict=True):  # a second pass: the latest may be cached
        if hashlib.sha256(sample_bytes(*split.item(i))).digest() != known:
            raise DataError(
                f"{split.where(i)}: read twice, it gives two different samples: put random changes of images "
                "into data.augment; a data set must give the same sample for the same number"
            )
    return digest.hexdigest()


def _evenly(length: int) -> list[int]:
    count = min(_NUM_HASHED, length)
    return [number * length // count for number in range(count)]
