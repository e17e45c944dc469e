"""The journal of a pack that is being written: a JSON line for how it was begun, then one for each shard.

A line is written when its shard is durable, so a process that is killed loses only the shard it was at.
"""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.data.pack.pack_facts import PackFile
from lockstep.data.pack.shard_file import sync_file, sync_names
from lockstep.errors import DataError


@dataclass(frozen=True)
class ShardLine:
    """A whole shard: the samples of its split up to `stop`, without the bad ones; `shard` None: all were."""

    split: str
    stop: int
    shard: PackFile | None
    bad: tuple[tuple[int, str], ...]  # (sample, what is wrong with it)


class PackJournal:
    """Holds the lines, and beside them each shard's part of the index; one process at a time has it."""

    def __init__(self, part: Path, begun: Mapping[str, Any]) -> None:
        self._folder = part / "unfinished"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._stream = (self._folder / "journal.jsonl").open("a+b")
        self.lines: list[ShardLine] = []
        try:
            fcntl.flock(self._stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._stream.close()
            raise DataError(f"{part}: another process is writing it: wait for it or end it") from error
        try:
            self._load(part, dict(begun))
        except BaseException:
            self._stream.close()
            raise

    def _load(self, part: Path, begun: dict[str, Any]) -> None:
        """Read the lines that are whole; what comes after them is cut off and written again."""
        self._stream.seek(0)
        end = 0
        for number, line in enumerate(self._stream):
            try:
                row = json.loads(line) if line.endswith(b"\n") else None
            except ValueError:
                row = None
            if row is None:
                break
            if number == 0:
                check_begun(part, row, begun)
            else:
                found = _shard_line(row)
                if found.shard and found.shard.fault(part):
                    break
                self.lines.append(found)
            end += len(line)
        self._stream.truncate(end)
        if not end:
            self._write(begun)

    def add(self, line: ShardLine, index: npt.NDArray[np.void] | None) -> None:
        """Record a shard that is durable."""
        if index is not None:
            with self._index_path(line).open("wb") as stream:
                np.save(stream, index)
                sync_file(stream)
        sync_names(self._folder)
        self._write(asdict(line))
        self.lines.append(line)

    def of(self, split: str) -> list[ShardLine]:
        return [line for line in self.lines if line.split == split]

    def index(self, split: str) -> npt.NDArray[np.void]:
        """The whole index of a split."""
        return np.concatenate([np.load(self._index_path(line)) for line in self.of(split) if line.shard])

    def close(self) -> None:
        self._stream.close()

    def remove(self) -> None:
        """Remove the journal, when the pack is whole."""
        self.close()
        shutil.rmtree(self._folder)

    def _index_path(self, line: ShardLine) -> Path:
        assert line.shard is not None
        return self._folder / f"{line.shard.file}.index.npy"

    def _write(self, row: Mapping[str, Any]) -> None:
        self._stream.write(json.dumps(row).encode() + b"\n")
        sync_file(self._stream)


def check_begun(part: Path, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Refuse to go on with a pack of another source or with other options."""
    changed = [key for key in ours if theirs.get(key) != ours[key]]
    if not changed:
        return
    if changed[0] in ("source_sha256", "state"):
        what = "from other images than SOURCE has now"
    else:
        what = f"with {changed[0]}={theirs.get(changed[0])}, which is now {ours[changed[0]]}"
    raise DataError(f"{part}: was begun {what}: remove it to begin anew, or run the command as it was then")


def _shard_line(row: Mapping[str, Any]) -> ShardLine:
    shard = PackFile(**row["shard"]) if row["shard"] else None
    return ShardLine(row["split"], row["stop"], shard, tuple((i, text) for i, text in row["bad"]))
