"""What sources of large files share: the split of a file, held-out samples, and numbered classes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lockstep.data.images.folder import FolderOptions
from lockstep.data.images.folder_listing import SPLITS
from lockstep.errors import DataError
from lockstep.kernels.random import key

Labels = npt.NDArray[np.int64]


def files_by_split(files: Sequence[Path]) -> dict[str, list[Path]]:
    """Files whose name has the word train, val, valid, validation or test; if none has, all are train."""
    found: dict[str, list[Path]] = {}
    for file in files:
        words = re.split(r"[^a-z]+", file.stem.lower())
        splits = [split for split, names in SPLITS.items() if set(names) & set(words)]
        found.setdefault(splits[0] if splits else "", []).append(file)
    unnamed = found.pop("", [])
    if unnamed and found:
        raise DataError(
            f"{unnamed[0]}: its name has none of the words train, val and test, which others have: rename or "
            "remove it"
        )
    if unnamed:
        return {"train": unnamed}
    if "train" not in found:
        raise DataError(f"{files[0].parent}: there is {', '.join(found)} but no train: name a train file too")
    return {split: found[split] for split in SPLITS if split in found}


def hold_out(names: Sequence[str]) -> npt.NDArray[np.bool_]:
    """Which samples are held out to evaluate on: by a hash of the name, a tenth of them, as of a folder."""
    options = FolderOptions()
    limit = int(options.val_fraction * 2.0**64)
    held = np.array([key("val", options.seed, name) + (1 << 63) < limit for name in names])
    if len(names) < 2:
        raise DataError("one image cannot be split: give more, or files of train and val")
    if not held.any() or held.all():
        held[:] = False
        held[-1] = True
    return held


def check_classes(
    labels: dict[str, Labels], names: tuple[str, ...] | None, where: Callable[[str, int], str]
) -> tuple[str, ...]:
    """The classes' names, or their numbers, which must then count from 0 without a gap."""
    there = np.unique(np.concatenate(list(labels.values())))
    count = len(names) if names else len(there)
    for split, found in labels.items():
        wrong = (found < 0) | (found >= count)
        if wrong.any():
            first = int(wrong.argmax())
            rule = f"{count} classes are named" if names else f"there are {count} classes, so labels jump"
            raise DataError(
                f"{where(split, first)}: label {found[first]}: must be 0 to {count - 1}, as {rule}: correct "
                "it, or name all classes with --classes FILE"
            )
    if count < 2:
        raise DataError(
            f"{where('train', 0)}: all images have label {there[0]}: a classifier needs two classes"
        )
    return names or tuple(map(str, range(count)))
