"""Images with rows of values from CSV files as a data set: several labels of an image, or numbers.

Data pipeline: store → order → augment → loader; this file makes a store. `DIR/train.csv` has a line for each
image: its file, as a path below DIR, then its values, which the first line names. `val.csv` and `test.csv`
are alike; without them, or with `DIR/labels.csv` alone, a fraction is held out as `val`, as of a folder.
"""

from __future__ import annotations

import csv
import hashlib
import math
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import torch

from lockstep.data.data_set import Count, DataSet
from lockstep.data.decoding.decode_fingerprint import explain_decoder
from lockstep.data.images.encoded_split import EncodedSplit
from lockstep.data.images.folder import FolderOptions, check_images, images_manifest
from lockstep.data.images.folder_listing import hold_out_files
from lockstep.data.images.image_file import STATISTICS, SUFFIXES, FileSource, ImageFile
from lockstep.data.images.size_cache import find_sizes
from lockstep.data.store import Store
from lockstep.errors import DataError

_SPLITS = ("train", "val", "test")
_ALONE = "labels"  # the name of a file that is the only one

Rows = dict[ImageFile, tuple[float, ...]]


@dataclass(frozen=True)
class _Table:
    """The rows of one CSV file, and the names of their values."""

    path: Path
    names: tuple[str, ...]
    rows: Rows


def open_csv(options: FolderOptions, folder: Path) -> Store:
    """Read the CSV files of a folder and the headers of all images that they name."""
    tables = _read_tables(folder)
    names, parts = tables["train"].names, _split(tables, options)
    last = "test" if "test" in parts else "val"
    mean, std = STATISTICS[options.channels]
    files = [file for rows in parts.values() for file in rows]
    sizes = dict(zip(files, find_sizes(files), strict=True))
    splits = {}
    for name, rows in parts.items():
        own = torch.stack([sizes[file] for file in rows])
        view = options.view(name, options.shape, options.eval_shape)
        fix = f"`lockstep data check csv --dir {folder}` finds all such files"
        splits[name] = EncodedSplit(FileSource(list(rows), own), torch.tensor(list(rows.values())), view, fix)
    counts = {name: len(rows) for name, rows in parts.items()}
    hashes = {name: _hash(rows) for name, rows in parts.items()}
    manifest = images_manifest("csv", options.shape, counts, hashes, options.decoder)
    held = "" if len(tables) > 1 else ", a share of which is held out to evaluate on"
    return Store(
        name="csv",
        classes=names,
        shape=options.shape,
        train=splits["train"],
        test=splits[last],
        mean=mean,
        std=std,
        manifest={**manifest, **options.facts()},
        val=splits["val"] if last == "test" and "val" in splits else None,
        test_name=last,
        notices=(f"images of {', '.join(str(t.path) for t in tables.values())}{held}", *explain_decoder()),
        eval_size=options.eval_size,
        has_values=True,
        sizes=options.stages,
    )


def check_csv(options: FolderOptions, folder: Path, on_progress: Count) -> list[str]:
    """Decode every image, and return a line for each one that fails."""
    files = [file for table in _read_tables(folder).values() for file in table.rows]
    return check_images(files, options.shape, on_progress)


def _read_tables(folder: Path) -> dict[str, _Table]:
    found = {name: folder / f"{name}.csv" for name in _SPLITS if (folder / f"{name}.csv").is_file()}
    if not found and (folder / f"{_ALONE}.csv").is_file():
        found = {"train": folder / f"{_ALONE}.csv"}
    if "train" not in found:
        raise DataError(
            f"{folder}: has no train.csv, and no labels.csv: a line for each image, with its file and its "
            "values, and a first line that names them, as file,cat,dog"
        )
    tables = {name: _read_table(path, folder) for name, path in found.items()}
    first = tables["train"]
    for table in tables.values():
        if table.names != first.names:
            raise DataError(
                f"{table.path}: has values {', '.join(table.names)}, and {first.path} has "
                f"{', '.join(first.names)}: they must be alike, in the same order"
            )
    return tables


def _read_table(path: Path, folder: Path) -> _Table:
    try:
        with path.open(newline="", encoding="utf-8-sig") as stream:
            lines = list(csv.reader(stream))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: cannot be read as CSV: {error}") from None
    names = tuple(name.strip() for name in lines[0][1:]) if lines else ()
    if not names or len(set(names)) < len(names) or not all(names):
        raise DataError(f"{path}: its first line must name the file and each value once, as file,cat,dog")
    rows: Rows = {}
    for number, line in enumerate(lines[1:], 2):
        if not line:
            continue
        where = f"{path}, line {number}"
        file, values = _find_file(where, folder, line[0].strip()), _read_values(where, names, line[1:])
        if file in rows:
            raise DataError(f"{where}: {file.name} is there already: name each image once")
        rows[file] = values
    if not rows:
        raise DataError(f"{path}: names no image: add a line for each")
    return _Table(path, names, rows)


def _find_file(where: str, folder: Path, name: str) -> ImageFile:
    path = PurePosixPath(name)
    if not name.lower().endswith(SUFFIXES) or path.is_absolute() or ".." in path.parts:
        raise DataError(f"{where}: {name!r} must be a path below {folder} that ends in {', '.join(SUFFIXES)}")
    try:
        status = (folder / path).stat()
    except OSError as error:
        raise DataError(f"{where}: {folder / path}: {error.strerror or error}") from None
    return ImageFile(str(folder), str(path), "", status.st_size, status.st_ctime_ns)


def _read_values(where: str, names: tuple[str, ...], texts: list[str]) -> tuple[float, ...]:
    if len(texts) != len(names):
        raise DataError(f"{where}: has {len(texts)} values, and the first line names {len(names)}")
    found = []
    for name, text in zip(names, texts, strict=True):
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise DataError(f"{where}: {name}={text.strip()!r} must be a number; a label is 0 or 1")
        found.append(value)
    return tuple(found)


def _split(tables: dict[str, _Table], options: FolderOptions) -> dict[str, Rows]:
    """The rows of each split; some are held out where there is only one file."""
    if len(tables) > 1:
        return {name: table.rows for name, table in tables.items()}
    rows = tables["train"].rows
    parts = hold_out_files(list(rows), options.val_fraction, options.seed)
    return {name: {file: rows[file] for file in part} for name, part in zip(_SPLITS, parts, strict=False)}


def _hash(rows: Rows) -> str:
    """A hash of names, sizes and values."""
    lines = [f"{file.name}\t{file.num_bytes}\t{values!r}\n" for file, values in rows.items()]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


DATA_SETS = (
    DataSet(
        "csv",
        FolderOptions,
        read=open_csv,
        check=check_csv,
        files="a folder with images and a train.csv or labels.csv",
    ),
)
