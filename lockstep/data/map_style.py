"""Makes a store of a user's map-style data set: an object with `len` that gives (image, target) by index.

Data pipeline of the Python API: store → order → augment → loader; this file makes the store.
Shapes: N images, C channels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.data.sample import (
    as_image,
    as_label,
    as_target,
    check_alike,
    is_label,
    is_mask,
    sample_bytes,
    stack_targets,
)
from lockstep.data.store import Store, check_labels
from lockstep.errors import DataError
from lockstep.kernels.random import integers, key
from lockstep.kernels.structure import describe, describe_tensor, leaves, map_tensors

_NUM_HASHED = 64
_TENTH = 10  # one sample in ten is held out of a single data set


def from_map_style(
    data: Any, tell: Callable[[str], None] = lambda text: None, any_target: bool = False
) -> Store:
    """Make a store of a data set or of a pair (train, test); a Store is returned as it is.

    `tell` gets a message before work that takes long. With `any_target`, targets may be other than integers;
    then the store has no classes.
    """
    if isinstance(data, Store):
        return data
    train, test = _split(data)
    if any_target:
        train, test = (replace(split, has_labels=train.is_labelled()) for split in (train, test))
    first, target = train.item(0)
    channels, height, width = first.shape
    classes = _classes(train, test, tell) if train.has_labels else ()
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
    )


@dataclass(frozen=True)
class MappedSplit:
    """Some samples of a user's data set; all must have the shapes and types of the first."""

    data: Any
    name: str
    indices: Sequence[int]
    has_labels: bool = True  # whether targets are class numbers
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.uint8
    target: Any = None  # of the first sample
    num_classes: int = 0

    def __len__(self) -> int:
        return len(self.indices)

    def expecting(self, image: Tensor, target: Any, num_classes: int) -> MappedSplit:
        """The same split, whose `read` refuses samples unlike these, and other classes."""
        return replace(
            self, shape=tuple(image.shape), dtype=image.dtype, target=target, num_classes=num_classes
        )

    def read(self, ids: Tensor) -> tuple[Tensor, Any]:
        images, targets = torch.empty((len(ids), *self.shape), dtype=self.dtype), []
        for number, i in enumerate(ids.tolist()):
            image, target = self.item(i)
            if tuple(image.shape) != self.shape or image.dtype != self.dtype:
                raise DataError(
                    f"{self.where(i)}: image is {describe(image)}, the first is "
                    f"{describe_tensor(self.dtype, self.shape)}: all must be equal; resize them in the data "
                    "set"
                )
            self._check_target(i, target)
            images[number].copy_(image)  # copied, as the data set may reuse its buffer
            targets.append(target if self.has_labels else map_tensors(Tensor.clone, target))
        if self.dtype.is_floating_point:
            self._check_finite(ids, images)
        return images, torch.tensor(targets, dtype=torch.int64) if self.has_labels else stack_targets(targets)

    def _check_target(self, i: int, target: Any) -> None:
        if self.has_labels:
            if not 0 <= target < self.num_classes:
                check_labels(self.where(i), torch.tensor([target]), self.num_classes)
            return
        try:
            check_alike(target, self.target)
        except TypeError as error:
            raise DataError(f"{self.where(i)}: {error}") from None
        if not all(part.isfinite().all() for part in leaves(target)):
            raise DataError(f"{self.where(i)}: the target has values that are not finite: correct it")

    def _check_finite(self, ids: Tensor, images: Tensor) -> None:
        bad = ~images.isfinite().flatten(1).all(1)
        if bad.any():
            first = int(ids[bad][0])
            raise DataError(f"{self.where(first)}: the image has values that are not finite: correct it")

    def where(self, i: int) -> str:
        return f"{self.name}[{self.indices[i]}]"

    def item(self, i: int) -> tuple[Tensor, Any]:
        """One sample: a tensor [C, H, W], and an integer or a structure of tensors."""
        sample = self.data[self.indices[i]]
        try:
            image, target = sample
            return as_image(image), as_label(target) if self.has_labels else as_target(target)
        except (TypeError, ValueError) as error:
            what = "label" if self.has_labels else "target"
            raise DataError(f"{self.where(i)}: a sample must be (image, {what}): {error}") from error

    def is_labelled(self) -> bool:
        """Whether the first sample's target is a class number."""
        sample = self.data[self.indices[0]]
        return not isinstance(sample, tuple | list) or len(sample) != 2 or is_label(sample[1])

    def labels(self) -> Tensor:
        """Every label: from the list `targets` or `labels` if there is one, else by reading all samples."""
        listed = self.listed_labels()
        return torch.tensor([self.item(i)[1] for i in range(len(self))]) if listed is None else listed

    def listed_labels(self) -> Tensor | None:
        """The labels in the data set's list `targets` or `labels`; None if it has no such list."""
        for name in ("targets", "labels"):
            listed = getattr(self.data, name, None)
            if listed is not None and not callable(listed) and len(listed) == len(self.data):
                numbers = np.asarray(listed)
                if numbers.ndim == 1 and numbers.dtype.kind in "iu":
                    return torch.as_tensor(numbers.astype(np.int64))[torch.as_tensor(self.indices)]
        return None


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


def _classes(train: MappedSplit, test: MappedSplit, tell: Callable[[str], None]) -> tuple[str, ...]:
    """The data set's class names; if it has none, the numbers from 0 to the largest label."""
    unlisted = sum(len(split) for split in (train, test) if split.listed_labels() is None)
    if unlisted:
        tell(
            f"reading {unlisted:,} samples of {type(train.data).__name__} for their labels, once: a list of "
            "them, as its attribute `targets`, saves this"
        )
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
