"""A folder of PNG and JPEG files as a data set; `folder_listing.py` finds classes, `image_file.py` decodes.

Data pipeline: store → order → augment → loader; this file makes a store. The folder holds
`DIR/train/CLASS/*` with `DIR/val/CLASS/*`, `DIR/test/CLASS/*` or both. If it holds only `DIR/train/CLASS/*`
or `DIR/CLASS/*`, a fraction of the files is held out as `val`, chosen by a hash of the file name. `val` may
also be called `valid` or `validation`.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from lockstep.data.data_set import Count, DataSet
from lockstep.data.decoding.batch_decoder import in_parallel
from lockstep.data.decoding.decode_fingerprint import decode_fingerprint, explain_decoder
from lockstep.data.images.encoded_split import EncodedSplit
from lockstep.data.images.folder_listing import find_roots, list_files, list_splits
from lockstep.data.images.image_file import STATISTICS, FileSource, ImageFile, read_image
from lockstep.data.images.size_cache import find_sizes
from lockstep.data.images.view_options import View, ViewOptions
from lockstep.data.store import Store, check_size
from lockstep.errors import DataError

_NAMED = 5  # most classes that an error lists


@dataclass(frozen=True)
class FolderOptions(ViewOptions):
    """What a user may set under `data.` for folder."""

    size: int = 64
    channels: int = 3
    val_fraction: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size < 1:
            raise DataError(f"data.size={self.size}: an image needs at least 1 pixel a side; try 64")
        check_size(self.size)
        if self.channels not in STATISTICS:
            raise DataError(f"data.channels={self.channels}: folder gives 1 (grey) or 3 (RGB) channels")
        if not 0 < self.val_fraction < 1:
            raise DataError(f"data.val_fraction={self.val_fraction}: must be between 0 and 1, such as 0.1")

    @property
    def shape(self) -> tuple[int, int, int]:
        size = self.stages[-1][1] if self.stages else self.size
        return self.channels, size, size

    @property
    def eval_shape(self) -> tuple[int, int, int]:
        return (self.channels, self.eval_size, self.eval_size) if self.eval_size else self.shape


def open_folder(options: FolderOptions, folder: Path) -> Store:
    """List, check and split the images below `folder`."""
    listing = list_splits(folder, options.val_fraction, options.seed)
    files, classes = listing.files, listing.classes
    views = {name: options.view(name, options.shape, options.eval_shape) for name in files}
    splits = _open_splits(files, classes, views, folder)
    last = "test" if "test" in splits else "val"
    mean, std = STATISTICS[options.channels]
    return Store(
        name="folder",
        classes=classes,
        shape=options.shape,
        train=splits["train"],
        test=splits[last],
        mean=mean,
        std=std,
        manifest=_manifest(options, files, last),
        val=splits["val"] if last == "test" and "val" in splits else None,
        test_name=last,
        notices=(str(listing), *explain_decoder()),
        warnings=tuple(listing.warnings()),
        eval_size=options.eval_size,
        sizes=options.stages,
    )


def _manifest(options: FolderOptions, files: dict[str, list[ImageFile]], last: str) -> dict[str, object]:
    """What identifies the images; here `test` is the split that judges the run, whatever its folder is."""
    both = {"test": files[last], **({"val": files["val"]} if len(files) == 3 else {})}
    parts = {"train": files["train"], **both}
    counts = {name: len(part) for name, part in parts.items()}
    hashes = {name: _names_sha256(part) for name, part in parts.items()}
    return {
        **images_manifest("folder", options.shape, counts, hashes, options.decoder),
        **options.facts(),
    }


def images_manifest(
    name: str, shape: tuple[int, int, int], counts: dict[str, int], hashes: dict[str, str], decoder: str
) -> dict[str, object]:
    """What identifies encoded images: number and hash of each split, size, and what decodes them."""
    return {
        "name": name,
        "size": shape[1],
        "channels": shape[0],
        **{f"num_{split}": count for split, count in counts.items()},
        **{f"{split}_sha256": sha256 for split, sha256 in hashes.items()},
        "decoder": decode_fingerprint(decoder),
    }


def check_folder(options: FolderOptions, folder: Path, on_progress: Count) -> list[str]:
    """Decode every image, and return a line for each one that fails."""
    listing = list_splits(folder, options.val_fraction, options.seed)
    files = [file for part in listing.files.values() for file in part]
    return check_images(files, options.shape, on_progress)


def check_images(files: Sequence[ImageFile], shape: tuple[int, int, int], on_progress: Count) -> list[str]:
    """Decode image files, and return a line for each one that fails."""

    def check(file: ImageFile) -> str:
        try:
            read_image(file.path, shape)
        except DataError as error:
            return str(error)
        return ""

    bad = []
    for done, fault in enumerate(in_parallel(check, files), 1):
        bad += [fault] if fault else []
        on_progress(done, len(files))
    return bad


def open_images(
    folder: Path, classes: Sequence[str], shape: tuple[int, int, int], split: str | None, share: float = 1.0
) -> tuple[Path, EncodedSplit]:
    """Open the images of another folder, labelled with a run's classes; returns their folder too.

    `split` defaults to test, then val. A folder that holds only class folders is used as a whole.
    """
    roots = find_roots(folder)
    choices = [split] if split else ["test", "val"]
    root = next((roots[name] for name in choices if name in roots), None)
    if root is None and (roots or split):
        there = ", ".join(f"{path.name}/" for path in roots.values()) or "classes"
        raise DataError(f"{folder}: has no {' or '.join(choices)} images, only {there}")
    files = list_files(root or folder, Counter())
    extra = sorted({file.label for file in files} - set(classes))
    if extra:
        known = ", ".join(classes[:_NAMED]) + (", …" if len(classes) > _NAMED else "")
        raise DataError(f"{root or folder}: class {', '.join(extra)} is not one of the run's: {known}")
    return root or folder, _open_splits({"": files}, classes, {"": View(shape, share)}, folder)[""]


def _open_splits(
    files: dict[str, list[ImageFile]], classes: Sequence[str], views: dict[str, View], folder: Path
) -> dict[str, EncodedSplit]:
    """Read the header of every file, so that a bad one is found before training starts."""
    finds = f"`lockstep data check folder --dir {folder}` finds all such files"
    try:
        sizes = find_sizes([file for part in files.values() for file in part])
    except DataError as error:
        raise DataError(f"{error}; {finds}") from error
    number, splits = {name: i for i, name in enumerate(classes)}, {}
    first = 0
    for name, part in files.items():
        own, first = sizes[first : first + len(part)], first + len(part)
        labels = torch.tensor([number[file.label] for file in part])
        fix = f"{finds}; after a repair, --resume RUN --data-changed goes on"
        splits[name] = EncodedSplit(FileSource(part, own), labels, views[name], fix)
    return splits


def _names_sha256(files: Sequence[ImageFile]) -> str:
    """A hash of names and sizes: cheap, and it changes when files are added, removed or resized."""
    lines = [f"{file.name}\t{file.num_bytes}\n" for file in files]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


DATA_SETS = (
    DataSet(
        "folder",
        FolderOptions,
        read=open_folder,
        check=check_folder,
        files="a folder that holds one folder of images a class",
    ),
)
