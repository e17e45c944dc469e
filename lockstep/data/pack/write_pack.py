"""Writes a pack in the order of its source, by several threads, and goes on where it was interrupted.

All is written to DEST.part and renamed to DEST at the end, so that a pack is either whole or not there.
"""

from __future__ import annotations

import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.data.decoding.batch_decoder import unreadable
from lockstep.data.decoding.decode import UNREADABLE, explain_unreadable
from lockstep.data.pack.finish_pack import rename_part, write_facts, write_indexes
from lockstep.data.pack.image_form import ImageForm, PackedImage
from lockstep.data.pack.pack_facts import FILE, PackFacts, hash_file, read_facts
from lockstep.data.pack.pack_journal import PackJournal, ShardLine, check_begun
from lockstep.data.pack.packable import Packable, PackableSplit
from lockstep.data.pack.shard_file import ShardFile, remove_unfinished, sync_names
from lockstep.errors import DataError

SHARD_MB = 256
THREADS = min(8, len(os.sched_getaffinity(0)))  # decoding and reading release the lock of Python
_BATCH = 8  # samples that a thread takes at once
_TOLD_EVERY = 64
_TAR_BYTES = 2048  # of a sample beside its image, at most

Told = Callable[[int, int], None]  # (samples done, of all)


@dataclass(frozen=True)
class PackPlan:
    """How a source is packed; neither `threads` nor `skip_bad` changes a shard."""

    form: ImageForm = field(default_factory=ImageForm)
    shard_mb: float = SHARD_MB
    threads: int = THREADS
    skip_bad: bool = False

    def __post_init__(self) -> None:
        if not self.shard_mb > 0:
            raise DataError(f"--shard-mb {self.shard_mb}: must be above 0; the default is {SHARD_MB}")
        if self.threads < 1:
            raise DataError(f"--threads {self.threads}: at least 1; the default here is {THREADS}")

    @property
    def shard_bytes(self) -> int:
        return int(self.shard_mb * 1e6)


@dataclass(frozen=True)
class PackResult:
    """How many samples each split has, and a line for each bad image; with these it may not be done."""

    counts: dict[str, int]
    bad: list[str]
    is_done: bool


def check_dest(dest: Path) -> None:
    """Refuse to write over what is there."""
    if dest.exists():
        raise DataError(f"{dest}: exists: a pack is never overwritten; remove it or choose another DEST")


def write_pack(
    source: Packable, dest: Path, plan: PackPlan, on_progress: Told = lambda done, total: None
) -> PackResult:
    """Write a pack, or go on with one. Bad images leave it undone, unless they are to be skipped."""
    check_dest(dest)
    if source.folder and dest.resolve().is_relative_to(source.folder.resolve()):
        raise DataError(f"{dest}: lies in SOURCE, which would then change: choose a DEST outside of it")
    part = dest.with_name(f"{dest.name}.part")
    shape = plan.form.shape(source)
    made_of: dict[str, Any] = {
        "source_sha256": source.identity,
        "form": plan.form.facts(source),
        "shard_bytes": plan.shard_bytes,
    }
    if (part / FILE).is_file():  # whole, but for its name
        facts = read_facts(part)
        check_begun(part, vars(facts), made_of)
        shutil.rmtree(part / "unfinished", ignore_errors=True)
        rename_part(part, dest)
        return PackResult({name: split.count for name, split in facts.splits.items()}, [], True)
    journal = PackJournal(part, {**made_of, "state": source.state})
    try:
        _check_space(source, part, shape, journal)
        _write_shards(source, part, plan, shape, journal, on_progress)
        result = _result(source, journal, plan.skip_bad)
        if result.is_done:
            facts = PackFacts(
                **made_of,
                classes=source.classes,
                splits=write_indexes(source, part, journal, plan.form.kind == "files"),
                skipped=len(result.bad),
                shape=source.pixels if plan.form.kind == "files" else shape,
                mean=source.mean,
                std=source.std,
            )
            write_facts(facts, part)
            journal.remove()
            rename_part(part, dest)
        return result
    except OSError as error:
        raise DataError(
            f"{part}: cannot be written ({error.strerror or error}): mend that and run the same command "
            "again, which goes on"
        ) from error
    except KeyboardInterrupt:
        remove_unfinished(part)
        raise
    finally:
        journal.close()


def _check_space(
    source: Packable, part: Path, shape: tuple[int, int, int] | None, journal: PackJournal
) -> None:
    count = sum(map(len, source.splits.values()))
    images = sum(split.num_bytes for split in source.splits.values())
    need = count * int(np.prod(shape)) if shape else images + count * _TAR_BYTES
    need -= sum(line.shard.bytes for line in journal.lines if line.shard)
    free = shutil.disk_usage(part).free
    if need > free:
        raise DataError(
            f"{part}: needs about {need / 1e6:,.0f} MB more, and {free / 1e6:,.0f} MB are free there: "
            "free some, or choose another DEST"
        )


def _write_shards(
    source: Packable,
    part: Path,
    plan: PackPlan,
    shape: tuple[int, int, int] | None,
    journal: PackJournal,
    on_progress: Told,
) -> None:
    """Write the shards that the journal does not have yet."""
    total, before = sum(map(len, source.splits.values())), 0
    for name, split in source.splits.items():
        lines = journal.of(name)
        start = lines[-1].stop if lines else 0
        number = sum(line.shard is not None for line in lines)
        key = start - sum(len(line.bad) for line in lines)
        shard, bad = None, []
        try:
            encode = partial(_encode, split, plan.form, shape[2] if shape else 3)
            for i, image in enumerate(_in_order(encode, start, len(split), plan.threads), start):
                if isinstance(image, PackedImage):
                    shard = shard or ShardFile(part, name, number, shape)
                    shard.add(key, image, int(split.labels[i]))
                    key += 1
                else:
                    bad.append((i, image))
                if i + 1 == len(split) or (shard and shard.num_bytes >= plan.shard_bytes):
                    journal.add(*_finish(name, i + 1, shard, bad))
                    number, shard, bad = number + (shard is not None), None, []
                if (i + 1) % _TOLD_EVERY == 0 or i + 1 == len(split):
                    on_progress(before + i + 1, total)
        finally:
            if shard:
                shard.abandon()
        before += len(split)


def _finish(
    split: str, stop: int, shard: ShardFile | None, bad: list[tuple[int, str]]
) -> tuple[ShardLine, npt.NDArray[np.void] | None]:
    if shard is None:
        return ShardLine(split, stop, None, tuple(bad)), None
    index = shard.finish()
    sync_names(shard.path.parent)
    return ShardLine(split, stop, hash_file(shard.path), tuple(bad)), index


def _encode(split: PackableSplit, form: ImageForm, channels: int, i: int) -> PackedImage | str:
    """One image, or what is wrong with it."""
    try:
        return form.encode(split.read(i), channels)
    except UNREADABLE as error:
        return unreadable(split.where(i), explain_unreadable(error))


def _in_order(
    work: Callable[[int], PackedImage | str], start: int, stop: int, threads: int
) -> Iterator[PackedImage | str]:
    """Apply `work` to start … stop - 1 in threads that are never far ahead; results come in order."""
    pending: deque[Future[list[PackedImage | str]]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        try:
            for first in range(start, stop, _BATCH):
                numbers = range(first, min(first + _BATCH, stop))
                pending.append(pool.submit(lambda batch: [work(i) for i in batch], numbers))
                if len(pending) > 2 * threads:
                    yield from pending.popleft().result()
            while pending:
                yield from pending.popleft().result()
        finally:
            for each in pending:
                each.cancel()


def _result(source: Packable, journal: PackJournal, skip_bad: bool) -> PackResult:
    bad = [text for line in journal.lines for _, text in line.bad]
    lost = {name: sum(len(line.bad) for line in journal.of(name)) for name in source.splits}
    counts = {name: len(split) - lost[name] for name, split in source.splits.items()}
    if skip_bad and not all(counts.values()):
        empty = next(name for name, count in counts.items() if not count)
        raise DataError(f"{empty}: not one of its {len(source.splits[empty]):,} images can be read: {bad[0]}")
    return PackResult(counts, bad, is_done=skip_bad or not bad)
