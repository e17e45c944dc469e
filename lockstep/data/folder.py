"""A folder of PNG and JPEG files, one subfolder a class, decoded when first read.

A store, so the first stop of a batch: store → order → augment → loader. `DIR/train/CLASS/*` with
`DIR/val/CLASS/*` (or test/), or a share of `DIR/train/CLASS/*` or `DIR/CLASS/*` held out by name.
Shapes: C channels, H rows, W columns.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG

import numpy as np
import PIL
import torch
from PIL import Image, ImageOps, UnidentifiedImageError, features
from torch import Tensor

from lockstep.data.store import Store, check_size
from lockstep.errors import DataError
from lockstep.kernels.random import key

IN_MEMORY_BYTES = 1 << 30
_SUFFIXES = (".png", ".jpg", ".jpeg")
_UNREADABLE = (OSError, SyntaxError, ValueError, UnidentifiedImageError, Image.DecompressionBombError)
_STATISTICS = {1: ((0.449,), (0.226,)), 3: ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))}
_NUM_THREADS = min(8, os.cpu_count() or 1)  # Pillow decodes without the interpreter's lock


@dataclass(frozen=True)
class FolderOptions:
    """What a user may set under `data.` for folder."""

    size: int = 64
    channels: int = 3
    val_fraction: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.size < 1:
            raise DataError(f"data.size={self.size}: an image needs at least 1 pixel a side; try 64")
        check_size(self.size)
        if self.channels not in _STATISTICS:
            raise DataError(f"data.channels={self.channels}: folder gives 1 (grey) or 3 (RGB) channels")
        if not 0 < self.val_fraction < 1:
            raise DataError(f"data.val_fraction={self.val_fraction}: must be between 0 and 1, such as 0.1")


@dataclass(frozen=True)
class _File:
    """An image file of one class; `name` is CLASS/FILE, so that it is the same wherever the folder lies."""

    path: Path
    name: str
    label: str


def open_folder(options: FolderOptions, folder: Path) -> Store:
    """List, check and split the images below `folder`."""
    train, test = _list_splits(options, folder)
    _check_headers([*train, *test])
    classes = tuple(sorted({file.label for file in train}))
    shape = (options.channels, options.size, options.size)
    mean, std = _STATISTICS[options.channels]
    return Store(
        name="folder",
        classes=classes,
        shape=shape,
        train=FolderSplit(train, classes, shape),
        test=FolderSplit(test, classes, shape),
        mean=mean,
        std=std,
        manifest={
            "name": "folder",
            "size": options.size,
            "channels": options.channels,
            "num_train": len(train),
            "num_test": len(test),
            "train_sha256": _names_sha256(train),
            "test_sha256": _names_sha256(test),
            "decoder": f"pillow {PIL.__version__}, libjpeg {features.version('jpg')}",
        },
    )


def _list_splits(options: FolderOptions, folder: Path) -> tuple[list[_File], list[_File]]:
    """The files of train and test, each in name order."""
    held = next((folder / name for name in ("val", "test") if (folder / name).is_dir()), None)
    if not (folder / "train").is_dir():
        if held is not None:
            raise DataError(f"{folder}: has {held.name}/ but no train/: put the training classes into train/")
        return _hold_out(_list_files(folder), options)
    train = _list_files(folder / "train")
    if held is None:
        return _hold_out(train, options)
    test = _list_files(held)
    extra = sorted({file.label for file in test} - {file.label for file in train})
    if extra:
        raise DataError(
            f"{held}: class {', '.join(extra)} is not in {folder / 'train'}: add it there or remove it"
        )
    return train, test


def _list_files(root: Path) -> list[_File]:
    """Every image below the class folders of `root`, in name order."""
    classes = sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    if not classes:
        raise DataError(f"{root}: holds no class folders: expected {root}/CLASS/*.png or *.jpg")
    files: list[_File] = []
    for path in classes:
        names = sorted(name.name for name in path.iterdir() if name.suffix.lower() in _SUFFIXES)
        if not names:
            raise DataError(f"{path}: class folder without images (.png, .jpg, .jpeg): fill or remove it")
        files += [_File(path / name, f"{path.name}/{name}", path.name) for name in names]
    for file in files:
        try:
            file.name.encode()
        except UnicodeEncodeError:
            raise DataError(f"{root}: the name {file.name!a} is not UTF-8: rename it") from None
    return files


def _hold_out(files: list[_File], options: FolderOptions) -> tuple[list[_File], list[_File]]:
    """Hold out the files whose hashed name falls below the fraction; each class keeps one for training."""
    rank = {file: key("val", options.seed, file.name) + (1 << 63) for file in files}
    kept = {file.label: file for file in sorted(files, key=lambda file: rank[file])}  # the last of each class
    free = [file for file in files if kept[file.label] is not file]
    if not free:
        raise DataError(
            f"{files[0].path.parent.parent}: {len(files)} images of {len(kept)} classes leave none to "
            "validate on: give every class at least 2 images"
        )
    lowest = min(free, key=lambda file: rank[file])
    limit = int(options.val_fraction * 2.0**64)
    held = {file for file in free if rank[file] < limit or file is lowest}
    return [file for file in files if file not in held], [file for file in files if file in held]


def _check_headers(files: Sequence[_File]) -> None:
    """Open every file as far as its header, before any work starts."""

    def check(file: _File) -> None:
        try:
            if not S_ISREG(file.path.stat().st_mode):
                raise OSError("no file")  # one that may never end
            with Image.open(file.path):
                pass
        except _UNREADABLE as error:
            raise _unreadable(file.path, error) from error

    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        for _ in pool.map(check, files):
            pass


def _unreadable(path: Path, error: Exception) -> DataError:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    reason = "not an image" if isinstance(error, UnidentifiedImageError) else text.replace("\n", " ")
    return DataError(f"{path}: unreadable image ({reason}): replace or remove it")


def _names_sha256(files: Sequence[_File]) -> str:
    """A hash of names and sizes: cheap, and it changes when files come, go or are edited."""
    lines = (f"{file.name}\t{file.path.stat().st_size}\n" for file in files)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


class FolderSplit:
    """A split that decodes files as they are read, and keeps the pixels where they fit into 1 GiB."""

    def __init__(self, files: Sequence[_File], classes: Sequence[str], shape: tuple[int, int, int]) -> None:
        number = {name: i for i, name in enumerate(classes)}
        self._paths = [file.path for file in files]
        self._labels = torch.tensor([number[file.label] for file in files])
        self._shape = shape
        self._kept: Tensor | None = None
        if len(files) * math.prod(shape) <= IN_MEMORY_BYTES:
            self._kept = torch.empty((len(files), *shape), dtype=torch.uint8)
        self._is_kept = torch.zeros(len(files), dtype=torch.bool)

    def __len__(self) -> int:
        return len(self._paths)

    def read(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        if self._kept is None:
            return self._decode(ids), self._labels[ids]
        absent = torch.tensor(sorted(set(ids[~self._is_kept[ids]].tolist())), dtype=torch.int64)
        if len(absent):
            self._kept[absent] = self._decode(absent)
            self._is_kept[absent] = True  # last: a reader in another thread sees whole images only
        return self._kept[ids], self._labels[ids]

    def _decode(self, ids: Tensor) -> Tensor:
        paths = [self._paths[i] for i in ids.tolist()]
        with ThreadPoolExecutor(_NUM_THREADS) as pool:
            images = list(pool.map(lambda path: read_image(path, self._shape)[0], paths))
        return torch.stack(images) if images else torch.empty((0, *self._shape), dtype=torch.uint8)


def read_image(path: Path, shape: tuple[int, int, int]) -> tuple[Tensor, tuple[int, int]]:
    """A file as uint8 [C, H, W] of `shape`, and its own (H, W): shorter side fitted, centre cropped."""
    channels, height, width = shape
    if channels not in _STATISTICS:
        raise DataError(f"{path}: an image file gives 1 or 3 channels, not the {channels} that are wanted")
    try:
        with Image.open(path) as file:
            upright = ImageOps.exif_transpose(file)
            plain = _as_mode(upright, "L" if channels == 1 else "RGB")
            fitted = ImageOps.fit(plain, (width, height), Image.Resampling.BILINEAR)
    except _UNREADABLE as error:
        raise _unreadable(path, error) from error
    pixels = torch.from_numpy(np.array(fitted)).view(height, width, -1).permute(2, 0, 1).contiguous()
    return pixels, (upright.height, upright.width)


def _as_mode(image: Image.Image, mode: str) -> Image.Image:
    """Grey or RGB from any mode; 16-bit greys are scaled, since Pillow would clip them at 255."""
    if image.mode.startswith("I"):
        image = Image.fromarray((np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8))
    if image.mode == "P":  # a palette may hold transparency, which only RGBA takes
        image = image.convert("RGBA")
    return image if image.mode == mode else image.convert(mode)
