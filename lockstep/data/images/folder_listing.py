"""Finds the classes of a folder and the image files of each split, by folder names or held out by name.

Folder names decide: `DIR/train/CLASS/*` with `DIR/val/CLASS/*`, `DIR/test/CLASS/*` or both. If there is only
train, or only `DIR/CLASS/*`, a hash of each file name decides whether it is held out as val.
"""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from operator import itemgetter
from pathlib import Path

from lockstep.data.images.image_file import SUFFIXES, ImageFile
from lockstep.errors import DataError
from lockstep.kernels.random import key

SPLITS = {"train": ("train",), "val": ("val", "valid", "validation"), "test": ("test",)}
_NAMED = 5  # most classes that a warning lists
_BY_NAME = itemgetter(ImageFile._fields.index("name"))


@dataclass
class Listing:
    """The images of each split below a folder, and the number of other files by suffix."""

    roots: dict[str, Path]
    files: dict[str, list[ImageFile]] = field(default_factory=dict)
    left_out: Counter[str] = field(default_factory=Counter)

    @cached_property
    def classes(self) -> tuple[str, ...]:
        return tuple(sorted({file.label for file in self.files["train"]}))

    @property
    def is_held_out(self) -> bool:
        """Whether there is only a folder of training images, so that val is held out from it."""
        return len(self.roots) == 1

    def __str__(self) -> str:
        """A sentence that says which folders are used, and for what."""
        count = {name: f"{len(part):,}" for name, part in self.files.items()}
        if self.is_held_out:
            where = self.roots["train"]
            return f"images of {where}: {count['train']} to train on, {count['val']} held out to evaluate on"
        use = {"train": "to train on", "val": "to evaluate on after every epoch"}
        use["test"] = "to evaluate on at the end" if "val" in count else use["val"]
        return "images: " + ", ".join(f"{self.roots[name]} ({count[name]}) {use[name]}" for name in count)

    def warnings(self) -> Iterator[str]:
        """Warnings about files that are ignored, and about splits without images of some class."""
        if self.left_out:
            kinds = ", ".join(
                f"{count} {kind}" for kind, count in sorted(self.left_out.items(), key=_most_first)
            )
            yield (
                f"left out, as only {', '.join(SUFFIXES)} in the folders of classes are read: {kinds}: "
                "convert, move or remove them"
            )
        for name, part in self.files.items():
            there = {file.label for file in part}
            missing = [label for label in self.classes if label not in there]
            if missing:
                more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
                where = self.roots.get(name, "what is held out")
                fix = "" if name in self.roots else ": raise data.val_fraction, or give a folder val/"
                yield (
                    f"{where}: no image of class {', '.join(missing[:_NAMED])}{more}: the accuracy there "
                    f"does not measure it{fix}"
                )


def _most_first(item: tuple[str, int]) -> tuple[int, str]:
    return -item[1], item[0]


def find_roots(folder: Path) -> dict[str, Path]:
    """The folder of each split that exists.

    Without train/, a folder called val or test may be a class: it is a split only if it holds folders.
    """
    found: dict[str, Path] = {}
    for split, names in SPLITS.items():
        there = [folder / name for name in names if (folder / name).is_dir()]
        if split != "train" and "train" not in found:
            there = [path for path in there if _class_folders(path)]
        if len(there) > 1:
            raise DataError(f"{folder}: has {_shown(there)}: both are {split}; keep one")
        if there:
            found[split] = there[0]
    return found


def _shown(paths: Iterable[Path]) -> str:
    return " and ".join(f"{path.name}/" for path in paths)


def list_splits(folder: Path, val_fraction: float, seed: int) -> Listing:
    """The files of each split in name order; if there is only train, some files are held out as val."""
    roots = find_roots(folder)
    if roots and "train" not in roots:
        raise DataError(
            f"{folder}: has {_shown(roots.values())} but no train/: put the training classes into train/"
        )
    listing = Listing(roots or {"train": folder})
    for split, root in listing.roots.items():
        listing.files[split] = list_files(root, listing.left_out)
        if len(listing.classes) < 2:
            raise DataError(
                f"{root}: has images of one class only, {listing.classes[0]}: a classifier needs two; is the "
                "folder of the classes one level higher or lower?"
            )
        extra = sorted({file.label for file in listing.files[split]} - set(listing.classes))
        if extra:
            raise DataError(
                f"{root}: class {', '.join(extra)} is not in {roots['train']}: add it there or remove it"
            )
    if listing.is_held_out:
        listing.files["train"], listing.files["val"] = hold_out_files(
            listing.files["train"], val_fraction, seed
        )
    return listing


def _class_folders(root: Path) -> list[Path]:
    return sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))


def list_files(root: Path, left_out: Counter[str]) -> list[ImageFile]:
    """Every image in the class folders of `root`, in name order; other files are counted in `left_out`."""
    classes = _class_folders(root)
    if not classes:
        raise DataError(f"{root}: holds no class folders: expected {root}/CLASS/*.png or *.jpg")
    files: list[ImageFile] = []
    names = (entry.name.lower() for entry in os.scandir(root) if entry.is_file())
    if beside := sum(name.endswith(SUFFIXES) for name in names if name[0] != "."):
        left_out["beside these folders"] += beside
    with _without_collection():
        for path in classes:
            found = sorted(_images_in(path, str(root), left_out), key=_BY_NAME)
            if not found:
                raise DataError(f"{path}: class folder without images (.png, .jpg, .jpeg): fill or remove it")
            files += found
    return files


@contextmanager
def _without_collection() -> Iterator[None]:
    """Python's garbage collector would look at a million files again and again, and find nothing."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _images_in(path: Path, root: str, left_out: Counter[str]) -> Iterator[ImageFile]:
    """The images of a class folder; there may be millions, so every call counts."""
    label, make = path.name, partial(tuple.__new__, ImageFile)
    with os.scandir(path) as entries:
        for entry in entries:
            own = entry.name
            if own[0] == ".":
                continue
            if not own.endswith(SUFFIXES) and not own.lower().endswith(SUFFIXES):
                kind = "folder" if entry.is_dir() else Path(own).suffix.lower() or "without suffix"
                left_out[kind] += 1
                continue
            name = f"{label}/{own}"
            if not (name.isascii() or _is_utf8(name)):
                raise DataError(f"{root}: the name {name!a} is not UTF-8: rename it")
            try:
                status = entry.stat()
            except OSError:  # a link to nowhere, found when its header is read
                yield make((root, name, label, 0, 0))
            else:
                yield make((root, name, label, status.st_size, status.st_ctime_ns))


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def hold_out_files(
    files: list[ImageFile], val_fraction: float, seed: int
) -> tuple[list[ImageFile], list[ImageFile]]:
    """Hold out files whose hashed name is below the fraction, at least one; a class keeps one to train on."""
    rank = {file.name: key("val", seed, file.name) + (1 << 63) for file in files}
    ranked = sorted(files, key=lambda file: rank[file.name])
    kept = {file.label: file.name for file in ranked}  # highest rank per class
    free = [file for file in ranked if kept[file.label] != file.name]
    if not free:
        raise DataError(
            f"{files[0].path.parent.parent}: {len(files)} images of {len(kept)} classes leave none to "
            "validate on: give a class at least 2 images"
        )
    limit = int(val_fraction * 2.0**64)
    held = {file.name for file in free if rank[file.name] < limit} | {free[0].name}
    return [file for file in files if file.name not in held], [file for file in files if file.name in held]
