"""A pack as a data set.

Data pipeline: store → order → augment → loader; this file makes a store. A folder and a pack of its files
have the same manifest, so that a run begun on one can go on with the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from lockstep.data.data_set import Count, DataSet
from lockstep.data.decoding.batch_decoder import in_parallel
from lockstep.data.decoding.decode_fingerprint import explain_decoder
from lockstep.data.images.encoded_split import EncodedSplit
from lockstep.data.images.folder import FolderOptions, images_manifest
from lockstep.data.images.image_file import STATISTICS
from lockstep.data.images.view_options import View, ViewOptions
from lockstep.data.pack.pack_facts import (
    PackFacts,
    PackFile,
    SplitFacts,
    check_files,
    hash_file,
    open_index,
    read_facts,
)
from lockstep.data.pack.pack_source import PackSource
from lockstep.data.pack.raw_split import RawSplit
from lockstep.data.store import Split, Store
from lockstep.errors import DataError


@dataclass(frozen=True)
class PackOptions(ViewOptions):
    """What a user may set under `data.` for pack; 0 is what the pack has, or a folder's default."""

    size: int = 0
    channels: int = 0

    def shape(self, facts: PackFacts, folder: Path, key: str = "size") -> tuple[int, int, int]:
        """C H W of the images to be given, whose size is under `key`."""
        last = self.stages[-1][1] if self.stages else 0
        size = (self.eval_size if key == "eval_size" else 0) or last or self.size
        default = FolderOptions()
        height, width, channels = facts.shape or (default.size, default.size, default.channels)
        if not facts.is_raw:
            size = size or (height if height == width else default.size)
            return FolderOptions(size=size, channels=self.channels or channels).shape
        most = max((size, *(each for _, each in self.stages)))
        key = "sizes" if self.stages and key == "size" else key
        fits = {key: 0 <= most <= min(height, width), "channels": self.channels in (0, channels)}
        for bad in (name for name, holds in fits.items() if not holds):
            raise DataError(
                f"data.{bad}={getattr(self, bad)}: {folder} holds raw pixels, {channels} × {height} × "
                f"{width}: leave data.{bad} out, or pack the images again"
            )
        return channels, size or height, size or width


def open_pack(options: PackOptions, folder: Path) -> Store:
    """Open a pack: its sizes and indexes are checked, no image is read."""
    facts = read_facts(folder)
    shape, eval_shape = options.shape(facts, folder), options.shape(facts, folder, "eval_size")
    check_files(folder, facts)
    splits = {
        name: _open_split(folder, facts, split, options.view(name, shape, eval_shape))
        for name, split in facts.splits.items()
    }
    last = "test" if "test" in splits else "val"
    statistics = STATISTICS.get(shape[0], ((0.5,) * shape[0], (0.25,) * shape[0]))
    own = facts.mean is not None and facts.std is not None and len(facts.mean) == shape[0]
    mean, std = (facts.mean, facts.std) if own else statistics
    assert mean is not None and std is not None
    use = {"train": "to train on", last: "to evaluate on after every epoch"}
    if len(splits) == 3:
        use |= {"val": "to evaluate on after every epoch", "test": "to evaluate on at the end"}
    counts = ", ".join(f"{split.count:,} {use[name]}" for name, split in facts.splits.items())
    return Store(
        name="pack",
        classes=facts.classes,
        shape=shape,
        train=splits["train"],
        test=splits[last],
        mean=mean,
        std=std,
        manifest={**_manifest(facts, shape, last, options.decoder), **options.facts()},
        val=splits["val"] if last == "test" and "val" in splits else None,
        test_name=last,
        notices=(f"images of {folder}: {counts}", *(() if facts.is_raw else explain_decoder())),
        warnings=_warnings(facts, folder),
        eval_size=options.eval_size,
        sizes=options.stages,
    )


def _open_split(folder: Path, facts: PackFacts, split: SplitFacts, view: View) -> Split:
    index = open_index(folder, facts, split)
    if facts.is_raw and facts.shape:
        return RawSplit(folder, split, index, facts.shape, view.shape, view.share)
    labels = torch.from_numpy(index["label"].astype(np.int64))
    fix = f"`lockstep data check pack --dir {folder}` finds every damaged file"
    return EncodedSplit(PackSource(folder, split, index), labels, view, fix)


def _manifest(facts: PackFacts, shape: tuple[int, int, int], last: str, decoder: str) -> dict[str, object]:
    """What identifies the images: a folder's names and sizes if its files were kept, else the content."""
    names = {"train": "train", "test": last, **({"val": "val"} if len(facts.splits) == 3 else {})}
    parts = {name: facts.splits[key] for name, key in names.items()}
    counts = {name: split.count for name, split in parts.items()}
    if all(split.names_sha256 for split in parts.values()):
        hashes = {k: v.names_sha256 for k, v in parts.items()}
        return images_manifest("folder", shape, counts, hashes, decoder)
    hashes = {k: v.content_sha256() for k, v in parts.items()}
    return images_manifest("pack", shape, counts, hashes, decoder)


def _warnings(facts: PackFacts, folder: Path) -> tuple[str, ...]:
    if not facts.skipped:
        return ()
    return (f"{folder}: {facts.skipped:,} bad images were left out when it was made: see skipped.txt there",)


def check_pack(_options: PackOptions, folder: Path, on_progress: Count) -> list[str]:
    """Hash every file, check every index, and return a line for each one that is bad."""
    try:
        facts = read_facts(folder)
    except DataError as error:
        return [str(error)]
    files = list(facts.files())

    def check(file: PackFile) -> str:
        if fault := file.fault(folder):
            return fault
        found = hash_file(folder / file.file).sha256
        if found == file.sha256:
            return ""
        return (
            f"{folder / file.file}: damaged: SHA-256 {found[:12]}…, pack.json says {file.sha256[:12]}…: "
            "copy the pack again or make it anew"
        )

    bad = {}
    for done, (file, fault) in enumerate(zip(files, in_parallel(check, files), strict=True), 1):
        bad.update({file.file: fault} if fault else {})
        on_progress(done, len(files))
    for split in facts.splits.values():
        if split.index.file not in bad:
            try:
                open_index(folder, facts, split)
            except DataError as error:
                bad[split.index.file] = str(error)
    return list(bad.values())


DATA_SETS = (
    DataSet(
        "pack",
        PackOptions,
        read=open_pack,
        check=check_pack,
        files="a pack, as `lockstep data pack SOURCE DEST` writes it",
    ),
)
