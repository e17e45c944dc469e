"""Parquet files as a source of packs, in the layout of Hugging Face: columns `image` and `label`."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from lockstep.data.pack.numbered import Labels, check_classes, files_by_split, hold_out
from lockstep.data.pack.packable import Packable, PackableSplit, digest_files
from lockstep.errors import DataError
from lockstep.spec.system import extra_command

_CACHED = 4  # row groups of a file that are held; threads are at one or two


def pack_parquet(files: list[Path], names: tuple[str, ...] | None) -> Packable:
    """List the images of Parquet files; `names` are those of classes, for files that do not name them."""
    tables = {
        split: [_Table(_parquet(), path) for path in paths] for split, paths in files_by_split(files).items()
    }
    rows = {
        split: [(table, row) for table in found for row in range(len(table.labels))]
        for split, found in tables.items()
    }
    if len(rows) == 1:
        both = rows["train"]
        held = hold_out([f"{table.path.name}/{row}" for table, row in both])
        rows = {
            split: [each for each, out in zip(both, held, strict=True) if out == (split == "val")]
            for split in ("train", "val")
        }
    splits = {split: _split(found) for split, found in rows.items()}
    labels = {split: found.labels for split, found in splits.items()}
    identity, state = digest_files(files)
    named = names or tables["train"][0].classes
    return Packable(
        classes=check_classes(labels, named, lambda split, i: splits[split].where(i)),
        splits=splits,
        identity=identity,
        state=state,
    )


def _parquet() -> ModuleType:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise DataError(f"Parquet files need pyarrow: {extra_command('parquet')}") from error
    return parquet  # type: ignore[no-any-return]


class _Table:
    """A Parquet file; images are read by row groups, of which the latest are held."""

    def __init__(self, parquet: ModuleType, path: Path) -> None:
        self.path = path
        try:
            self._file: Any = parquet.ParquetFile(path)
            self.labels = self._labels()
        except (OSError, ValueError) as error:  # ArrowInvalid is a ValueError
            raise DataError(f"{path}: no Parquet file of images ({_line(error)}): fetch it again") from error
        groups = [self._file.metadata.row_group(i).num_rows for i in range(self._file.num_row_groups)]
        self._starts = np.concatenate([[0], np.cumsum(groups)])
        self._groups: dict[int, Any] = {}
        self._lock = threading.Lock()

    def _labels(self) -> Labels:
        schema = self._file.schema_arrow
        for name in ("image", "label"):
            if name not in schema.names:
                raise ValueError(f"has columns {', '.join(schema.names)}, and needs image and label")
        column = self._file.read(columns=["label"])["label"]
        if column.null_count or not str(column.type).startswith(("int", "uint")):
            raise ValueError(f"labels must be integers, not {column.type} with {column.null_count} missing")
        return np.asarray(column.to_numpy()).astype(np.int64)

    @property
    def classes(self) -> tuple[str, ...] | None:
        """The names that Hugging Face's metadata has."""
        text = (self._file.schema_arrow.metadata or {}).get(b"huggingface")
        try:
            return tuple(json.loads(text)["info"]["features"]["label"]["names"]) if text else None
        except (ValueError, KeyError, TypeError):
            return None

    def read(self, row: int) -> bytes:
        """The encoded image of a row; ValueError if there is none."""
        group = int(np.searchsorted(self._starts, row, side="right")) - 1
        with self._lock:
            if group not in self._groups:
                while len(self._groups) >= _CACHED:
                    del self._groups[next(iter(self._groups))]
                self._groups[group] = self._file.read_row_group(group, columns=["image"])["image"]
            value = self._groups[group][row - int(self._starts[group])].as_py()
        data = value.get("bytes") if isinstance(value, dict) else value
        if not isinstance(data, bytes):
            raise ValueError("no bytes in the column image")
        return data


def _split(rows: list[tuple[_Table, int]]) -> PackableSplit:
    tables = {table.path: table for table, _ in rows}
    return PackableSplit(
        labels=np.array([table.labels[row] for table, row in rows], dtype=np.int64),
        names=[f"{table.path.name}/{row}" for table, row in rows],
        read=lambda i: rows[i][0].read(rows[i][1]),
        where=lambda i: f"{rows[i][0].path}: row {rows[i][1]}",
        num_bytes=sum(path.stat().st_size for path in tables),
    )


def _line(error: Exception) -> str:
    return str(error).partition("\n")[0]
