"""The store of an opened data set: splits of images and labels, classes, a manifest that identifies it.

The first stop of a batch: store → order → augment → loader. Shapes: N images, C channels, H, W pixels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from lockstep.errors import DataError

_MOST_PIXELS = 1 << 14


class Split(Protocol):
    """Images that can be read by number."""

    def __len__(self) -> int: ...

    def read(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Images [N, C, H, W] (uint8, or float already in its final range) and int64 labels [N]."""


@dataclass(frozen=True)
class MemorySplit:
    """A split that lies in memory as one tensor."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.images[ids], self.labels[ids]


@dataclass(frozen=True)
class Store:
    """A data set: its splits, its classes, and what normalizes it.

    With `val`, every epoch is evaluated on it and the best checkpoint chosen by it, and `test` is looked at
    once, at the end. Without, `test` serves for both, under the name it has where it comes from.
    """

    name: str
    classes: tuple[str, ...]
    shape: tuple[int, int, int]  # C H W
    train: Split
    test: Split
    mean: tuple[float, ...]  # of each channel, for uint8 images after division by 255
    std: tuple[float, ...]
    manifest: Mapping[str, Any] = field(default_factory=dict)
    val: Split | None = None
    test_name: str = "test"  # "val" where validation images are all there is to evaluate on
    notices: tuple[str, ...] = ()  # what a user should know of how it was read
    warnings: tuple[str, ...] = ()

    @property
    def chosen_by(self) -> tuple[str, Split]:
        """The images that every epoch is evaluated on, and their name."""
        return (self.test_name, self.test) if self.val is None else ("val", self.val)

    def eval_splits(self) -> dict[str, Split]:
        """All that can be evaluated on, by name."""
        return dict([self.chosen_by, (self.test_name, self.test)])

    def facts(self) -> dict[str, Any]:
        """What the identity says of it; enough to use a trained model without it."""
        shown = {"classes": self.classes, "shape": self.shape, "mean": self.mean, "std": self.std}
        return {**self.manifest, **shown}


def check_size(size: int) -> None:
    """Refuse images that no model takes, and no memory."""
    if size > _MOST_PIXELS:
        raise DataError(f"data.size={size}: an image has at most {_MOST_PIXELS} pixels a side")


def check_labels(where: str, labels: Tensor, num_classes: int) -> None:
    """Refuse a label outside [0, num_classes), naming the first."""
    bad = torch.nonzero((labels < 0) | (labels >= num_classes))
    if len(bad):
        first = int(bad[0, 0])
        raise DataError(
            f"{where}: label {int(labels[first])} of sample {first} is out of range: "
            f"labels must be 0 to {num_classes - 1}; correct the file or fetch it again"
        )


def content_sha256(*splits: MemorySplit) -> str:
    """One hash over the image and label bytes of packed splits, the same however the files were packed."""
    digest = hashlib.sha256()
    for split in splits:
        digest.update(split.images.contiguous().numpy().data)
        digest.update(split.labels.numpy().astype("<i8").data)
    return digest.hexdigest()
