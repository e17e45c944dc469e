"""The last steps of writing a pack: its indexes, names and pack.json, then its name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.data.pack.pack_facts import FILE, PackFacts, PackFile, SplitFacts, hash_file
from lockstep.data.pack.pack_journal import PackJournal
from lockstep.data.pack.packable import Packable, digest_lines
from lockstep.data.pack.shard_file import sync_file, sync_names
from lockstep.errors import DataError


def write_indexes(
    source: Packable, part: Path, journal: PackJournal, keeps_files: bool
) -> dict[str, SplitFacts]:
    """Write each split's index and names, and the names of bad images; gives what pack.json says of them."""
    splits, skipped = {}, []
    for name, split in source.splits.items():
        index, lines = journal.index(name), journal.of(name)
        bad = {i for line in lines for i, _ in line.bad}
        names = [each for i, each in enumerate(split.names) if i not in bad]
        with (part / f"{name}.index.npy").open("wb") as stream:
            np.save(stream, index)
            sync_file(stream)
        texts = "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in names)
        splits[name] = SplitFacts(
            count=len(index),
            index=hash_file(part / f"{name}.index.npy"),
            names=_write_file(part / f"{name}.names.jsonl", texts.encode()),
            shards=tuple(line.shard for line in lines if line.shard),
            names_sha256=_names_sha256(names, index) if source.folder and keeps_files else "",
        )
        skipped += [f"{name}\t{split.names[i]}\n" for i in sorted(bad)]
    if skipped:
        _write_file(part / "skipped.txt", "".join(skipped).encode())
    return splits


def _names_sha256(names: list[str], index: npt.NDArray[np.void]) -> str:
    """The hash of names and sizes that a folder of these files has."""
    sizes: list[Any] = index["length"].tolist()
    return digest_lines(f"{name}\t{size}" for name, size in zip(names, sizes, strict=True))


def write_facts(facts: PackFacts, part: Path) -> None:
    """Write pack.json, from which on the pack is whole."""
    _write_file(part / f"{FILE}.tmp", facts.to_json())
    sync_names(part)
    (part / f"{FILE}.tmp").replace(part / FILE)
    sync_names(part)


def _write_file(path: Path, data: bytes) -> PackFile:
    with path.open("wb") as stream:
        stream.write(data)
        sync_file(stream)
    return hash_file(path)


def rename_part(part: Path, dest: Path) -> None:
    """Give a whole pack its name."""
    if dest.exists():  # made by another process meanwhile
        raise DataError(f"{dest}: exists now, and {part} is whole: rename it to another name")
    part.rename(dest)
    sync_names(dest.parent)
