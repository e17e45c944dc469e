"""`Store`, an opened data set: splits of images and labels, class names, and a manifest that identifies it.

Data pipeline: store → order → augment → loader. Shapes: N images, C channels, H, W pixels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from lockstep.errors import DataError
from lockstep.spec import Train

_MOST_PIXELS = 1 << 14


class Split(Protocol):
    """Images and labels that can be read by sample id."""

    def __len__(self) -> int: ...

    def read(self, ids: Tensor) -> tuple[Tensor, Any]:
        """Images [N, C, H, W] (uint8, or float already in its final range) and their targets.

        Targets are int64 labels [N]; in a store that has values, numbers [N, values] or [N]; in one without
        classes, a structure of tensors [N, …].
        """


@dataclass(frozen=True)
class MemorySplit:
    """A split that is held in memory: one tensor of images, one of labels."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.images[ids], self.labels[ids]


@dataclass(frozen=True)
class Store:
    """An opened data set: splits, classes, and the statistics that normalize its images.

    With `val`, every epoch is evaluated on `val`, which also chooses the best checkpoint, and `test` is
    evaluated once, at the end. Without `val`, `test` serves both purposes and is shown as `test_name`.
    """

    name: str
    classes: tuple[str, ...]  # none if targets are not class numbers
    shape: tuple[int, int, int]  # C H W
    train: Split
    test: Split
    mean: tuple[float, ...]  # of each channel, for uint8 images after division by 255
    std: tuple[float, ...]
    manifest: Mapping[str, Any] = field(default_factory=dict)
    val: Split | None = None
    test_name: str = "test"  # "val" if the data has validation images but no test images
    notices: tuple[str, ...] = ()  # for the user: how the data was read
    warnings: tuple[str, ...] = ()
    has_masks: bool = False  # whether a part of a target lies on the pixels of its image
    eval_size: int = 0  # pixels a side of val and test images; 0: as for training
    has_values: bool = False  # whether a target is a row of values, which `classes` name
    sizes: tuple[tuple[int, int], ...] = ()  # of training images: from which epoch, and pixels a side

    @property
    def train_shapes(self) -> list[tuple[int, int, int]]:
        """C H W of training images, at every size that they have; the last is `shape`."""
        sizes = dict.fromkeys(size for _, size in self.sizes if size != self.shape[1])
        return [*((self.shape[0], size, size) for size in sizes), self.shape]

    @property
    def chosen_by(self) -> tuple[str, Split]:
        """The split that every epoch is evaluated on and that chooses the best checkpoint, with its name."""
        return (self.test_name, self.test) if self.val is None else ("val", self.val)

    @property
    def eval_shape(self) -> tuple[int, int, int]:
        """C H W of the images of `val` and `test`."""
        return (self.shape[0], self.eval_size, self.eval_size) if self.eval_size else self.shape

    def eval_splits(self) -> dict[str, Split]:
        """The splits that a model can be evaluated on, by name."""
        return dict([self.chosen_by, (self.test_name, self.test)])

    def facts(self) -> dict[str, Any]:
        """The data's part of a run's identity; it is enough to use a trained model without the data."""
        shown = {"classes": self.classes, "shape": self.shape, "mean": self.mean, "std": self.std}
        return {**self.manifest, **shown, **({"values": True} if self.has_values else {})}


def check_batch(store: Store, train: Train) -> None:
    """Refuse a batch that the training images do not fill once."""
    batch = max(stage.batch for stage in train.stages)
    if len(store.train) < batch:
        raise DataError(
            f"train.batch={batch} is more than the {len(store.train)} training images of {store.name}: "
            "lower train.batch"
        )


def check_size(size: int, key: str = "size") -> None:
    """Refuse images that are too large for any model or memory."""
    if size > _MOST_PIXELS:
        raise DataError(f"data.{key}={size}: an image has at most {_MOST_PIXELS} pixels a side")


def check_labels(where: str, labels: Tensor, num_classes: int) -> None:
    """Refuse labels outside [0, num_classes); the error names the first one."""
    bad = torch.nonzero((labels < 0) | (labels >= num_classes))
    if len(bad):
        first = int(bad[0, 0])
        raise DataError(
            f"{where}: label {int(labels[first])} of sample {first} is out of range: "
            f"labels must be 0 to {num_classes - 1}; correct the file or fetch it again"
        )


def content_sha256(*splits: MemorySplit) -> str:
    """One hash over the bytes of images and labels; it does not depend on how their files were compressed."""
    digest = hashlib.sha256()
    for split in splits:
        digest.update(split.images.contiguous().numpy().data)
        digest.update(split.labels.numpy().astype("<i8").data)
    return digest.hexdigest()
