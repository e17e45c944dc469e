"""Makes a store of a user's map-style data set: an object with `len` that gives (image, label) by index.

Data pipeline of the Python API: store → order → augment → loader; this file makes the store.
Images are tensors (C H W or H W), NumPy arrays (H W C or H W) or Pillow images. Shapes: N images, C channels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from lockstep.data.store import Store, check_labels
from lockstep.errors import DataError
from lockstep.kernels.random import integers, key

_NUM_HASHED = 64
_CHANNELS = 4  # an array with more is probably C H W by mistake
_TENTH = 10  # one sample in ten is held out of a single data set


def from_map_style(data: Any, tell: Callable[[str], None] = lambda text: None) -> Store:
    """Make a store of a data set or of a pair (train, test); a Store is returned as it is.

    `tell` gets a message before work that takes long.
    """
    if isinstance(data, Store):
        return data
    train, test = _split(data)
    first = train.item(0)[0]
    channels, height, width = first.shape
    classes = _classes(train, test, tell)
    unit = first.is_floating_point()  # floats are used as they are
    return Store(
        name=type(train.data).__name__,
        classes=classes,
        shape=(channels, height, width),
        train=train.expecting(first, len(classes)),
        test=test.expecting(first, len(classes)),
        mean=(0.0 if unit else 0.5,) * channels,
        std=(1.0 if unit else 0.25,) * channels,
        manifest={
            "name": "map-style",
            "type": f"{type(train.data).__module__}.{type(train.data).__qualname__}",
            "num_train": len(train),
            "num_test": len(test),
            "sample_sha256": _sample_sha256(train, test),
        },
    )


@dataclass(frozen=True)
class MappedSplit:
    """Some samples of a user's data set; all must have the shape and type of the first."""

    data: Any
    name: str
    indices: Sequence[int]
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.uint8
    num_classes: int = 0

    def __len__(self) -> int:
        return len(self.indices)

    def expecting(self, image: Tensor, num_classes: int) -> MappedSplit:
        """The same split, whose `read` refuses other shapes and types than `image`'s, and other classes."""
        return MappedSplit(self.data, self.name, self.indices, tuple(image.shape), image.dtype, num_classes)

    def read(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        images, labels = torch.empty((len(ids), *self.shape), dtype=self.dtype), []
        for number, i in enumerate(ids.tolist()):
            image, label = self.item(i)
            if tuple(image.shape) != self.shape or image.dtype != self.dtype:
                raise DataError(
                    f"{self.where(i)}: image is {_describe(image.dtype, image.shape)}, the first is "
                    f"{_describe(self.dtype, self.shape)}: all must be equal; resize them in the data set"
                )
            if not 0 <= label < self.num_classes:
                check_labels(self.where(i), torch.tensor([label]), self.num_classes)
            images[number].copy_(image)  # copied, as the data set may reuse its buffer
            labels.append(label)
        if self.dtype.is_floating_point:
            self._check_finite(ids, images)
        return images, torch.tensor(labels, dtype=torch.int64)

    def _check_finite(self, ids: Tensor, images: Tensor) -> None:
        bad = ~images.isfinite().flatten(1).all(1)
        if bad.any():
            first = int(ids[bad][0])
            raise DataError(f"{self.where(first)}: the image has values that are not finite: correct it")

    def where(self, i: int) -> str:
        return f"{self.name}[{self.indices[i]}]"

    def item(self, i: int) -> tuple[Tensor, int]:
        """One sample as a tensor [C, H, W] and an integer."""
        sample = self.data[self.indices[i]]
        try:
            image, label = sample
            return _as_tensor(image), _as_label(label)
        except (TypeError, ValueError) as error:
            raise DataError(f"{self.where(i)}: a sample must be (image, label): {error}") from error

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


def _describe(dtype: torch.dtype, shape: Iterable[int]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {'x'.join(map(str, shape))}"


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


def _as_tensor(image: Any) -> Tensor:
    if isinstance(image, Image.Image):
        image = np.array(image if image.mode in ("L", "RGB") else image.convert("RGB"))
    if isinstance(image, np.ndarray):
        array = torch.from_numpy(np.array(image))
        if array.dim() == 3 and array.shape[2] > _CHANNELS >= array.shape[0]:
            raise TypeError(
                f"an array is H x W x C, so this one has {array.shape[2]} channels: give "
                "torch.from_numpy(image) if it is C x H x W"
            )
        tensor = array.permute(2, 0, 1).contiguous() if array.dim() == 3 else array
    elif isinstance(image, Tensor):
        tensor = image.detach()
    else:
        raise TypeError(f"an image is a tensor, an array or a Pillow image, not {type(image).__name__}")
    if tensor.dim() == 2:
        tensor = tensor.unsqueeze(0)
    if tensor.dim() != 3 or not (tensor.dtype == torch.uint8 or tensor.is_floating_point()):
        raise TypeError(
            f"an image is uint8 or float in 2 or 3 dims, not {_describe(tensor.dtype, tensor.shape)}"
        )
    return tensor.float() if tensor.is_floating_point() else tensor


def _as_label(label: Any) -> int:
    size = label.numel() if isinstance(label, Tensor) else np.size(label)
    if size != 1:
        raise TypeError(f"a label is an integer, not {size} values: for a one-hot label, give its argmax()")
    number = label.item() if isinstance(label, Tensor | np.ndarray | np.generic) else label
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError(f"a label is an integer, not {type(label).__name__}")
    return number


def _sample_sha256(*splits: MappedSplit) -> str:
    """A hash over at most 64 samples of each split, evenly spaced: enough to tell data sets apart.

    A sample that differs when it is read again is refused, since no run could be repeated.
    """
    digest, hashes = hashlib.sha256(), []
    places = [(split, i) for split in splits for i in _evenly(len(split))]
    for split, i in places:
        found = _sample_bytes(*split.item(i))
        digest.update(found)
        hashes.append(hashlib.sha256(found).digest())
    for (split, i), known in zip(places, hashes, strict=True):  # a second pass: the latest may be cached
        if hashlib.sha256(_sample_bytes(*split.item(i))).digest() != known:
            raise DataError(
                f"{split.where(i)}: read twice, it gives two different samples: put random changes of images "
                "into data.augment; a data set must give the same sample for the same number"
            )
    return digest.hexdigest()


def _evenly(length: int) -> list[int]:
    count = min(_NUM_HASHED, length)
    return [number * length // count for number in range(count)]


def _sample_bytes(image: Tensor, label: int) -> bytes:
    described = f"{_describe(image.dtype, image.shape)} {label}".encode()
    return described + image.contiguous().numpy().tobytes()
