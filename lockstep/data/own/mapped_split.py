"""Some samples of a user's map-style data set, read in this process or in others.

Data pipeline: store → order → augment → loader; `map_style` makes a store of such splits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.data.own.data_processes import DataProcesses, UnlikeSample, UnreadSample, find_processes
from lockstep.data.own.sample_server import SampleForm
from lockstep.data.sample import as_image, as_label, as_target, check_alike, is_label, stack_targets
from lockstep.data.store import check_labels
from lockstep.errors import DataError
from lockstep.kernels.structure import describe, describe_tensor, leaves, map_tensors


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
    known: Tensor | None = None  # every label, once they were read

    def __len__(self) -> int:
        return len(self.indices)

    def expecting(self, image: Tensor, target: Any, num_classes: int) -> MappedSplit:
        """The same split, whose `read` refuses samples unlike these, and other classes."""
        return replace(
            self, shape=tuple(image.shape), dtype=image.dtype, target=target, num_classes=num_classes
        )

    def read(self, ids: Tensor) -> tuple[Tensor, Any]:
        processes = find_processes(self.data)
        images, targets = self._read_by(processes, ids) if processes else self._read_here(ids)
        if self.dtype.is_floating_point:
            self._check_finite(ids, images, "image")
        if not self.has_labels:
            for part in leaves(targets):
                self._check_finite(ids, part, "target")
        return images, targets

    def _read_here(self, ids: Tensor) -> tuple[Tensor, Any]:
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
        return images, torch.tensor(targets, dtype=torch.int64) if self.has_labels else stack_targets(targets)

    def _read_by(self, processes: DataProcesses, ids: Tensor) -> tuple[Tensor, Any]:
        """The same by other processes; a sample that they cannot take is read here, for the error."""
        numbers = [int(self.indices[i]) for i in ids.tolist()]
        form = SampleForm(describe_tensor(self.dtype, self.shape), self.target, self.has_labels)
        try:
            images, targets = processes.read(self.data, numbers, form, self.shape, self.dtype)
        except UnlikeSample as error:
            self._read_here(ids[error.place : error.place + 1])
            where = self.where(int(ids[error.place]))
            raise DataError(f"{where}: another sample in a data process than in its parent") from None
        except UnreadSample as error:
            raise DataError(f"{self.where(int(ids[error.place]))}: {error}") from None
        for i, label in zip(ids.tolist(), targets.tolist(), strict=True) if self.has_labels else ():
            self._check_target(i, label)
        return images, targets

    def _check_target(self, i: int, target: Any) -> None:
        if self.has_labels:
            if not 0 <= target < self.num_classes:
                check_labels(self.where(i), torch.tensor([target]), self.num_classes)
            return
        try:
            check_alike(target, self.target)
        except TypeError as error:
            raise DataError(f"{self.where(i)}: {error}") from None

    def _check_finite(self, ids: Tensor, values: Tensor, what: str) -> None:
        bad = ~values.isfinite().flatten(1).all(1) if values.dim() > 1 else ~values.isfinite()
        if bad.any():
            first = int(ids[bad][0])
            raise DataError(f"{self.where(first)}: the {what} has values that are not finite: correct it")

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
        listed = self.listed_labels() if self.known is None else self.known
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
