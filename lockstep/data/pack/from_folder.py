"""A folder of images as a source of packs: the classes, splits and order that `data.name=folder` gives it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lockstep.data.decoding.decode_server import read_bytes
from lockstep.data.images.folder import FolderOptions
from lockstep.data.images.folder_listing import list_splits
from lockstep.data.images.image_file import ImageFile
from lockstep.data.pack.packable import Packable, PackableSplit, digest_lines


def pack_folder(options: FolderOptions, folder: Path) -> Packable:
    """List the images below a folder."""
    listing = list_splits(folder, options.val_fraction, options.seed)
    number = {name: i for i, name in enumerate(listing.classes)}
    splits, known, times = {}, [], []
    for name, files in listing.files.items():
        splits[name] = _split(files, number)
        known += [f"{name}\t{file.name}\t{file.num_bytes}" for file in files]
        times += [str(file.changed_ns) for file in files]
    identity = digest_lines(known)
    return Packable(
        classes=listing.classes,
        splits=splits,
        identity=identity,
        state=digest_lines([identity, *times]),
        folder=folder,
        channels=options.channels,
        warnings=tuple(listing.warnings()),
    )


def _split(files: list[ImageFile], number: dict[str, int]) -> PackableSplit:
    return PackableSplit(
        labels=np.array([number[file.label] for file in files], dtype=np.int64),
        names=[file.name for file in files],
        read=lambda i: read_bytes(f"{files[i].root}/{files[i].name}"),
        where=lambda i: str(files[i].path),
        num_bytes=sum(file.num_bytes for file in files),
    )
