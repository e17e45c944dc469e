"""Writes, reads and prunes checkpoints: a safetensors file and a JSON manifest, which is the commit.

Every file is written under a temporary name, synced and renamed; then the folder is synced. So a crash at any
moment leaves either the old state or the new one. The manifest is written last and holds the SHA-256 of the
tensors. Without a complete manifest there is no checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from lockstep.errors import CheckpointError
from lockstep.runs.state_parts import StateParts, StatePiece
from lockstep.runs.tensor_file import TensorFile, file_sha256
from lockstep.runs.train_state import TrainState, hash_state

_FORMAT = 1
_MANIFEST = re.compile(r"step-(\d{9,})\.json")
_LEFTOVER = re.compile(r"step-\d{9,}\.safetensors|\.step-\d{9,}\.(?:safetensors|json)\.\d+\.tmp")


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was read and whose hash is correct."""

    path: Path
    manifest: dict[str, Any]
    tensors: TensorFile  # read when they are asked for

    def restore(self, state: TrainState) -> None:
        """Copy the checkpoint into a state of the same model and optimizer, of which this worker has all."""
        try:
            state.load_tensors(self.tensors)
            state.load_cursor(self.manifest["cursor"])
        except (KeyError, TypeError, RuntimeError) as error:
            raise CheckpointError(f"{self.path}: does not fit this model or optimizer: {error}") from None

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Refuse a checkpoint whose tensors have other names or shapes."""
        found = {name: self.tensors.shape(name) for name in self.tensors}
        differ = sorted(name for name, _ in found.items() ^ shapes.items())
        if differ:
            raise CheckpointError(f"{self.path}: does not fit this model or optimizer: {differ[0]}")


@dataclass(frozen=True)
class NewCheckpoint:
    """A checkpoint that is not whole yet: its place, and what its manifest says beside the tensors."""

    folder: Path
    cursor: dict[str, Any]
    identity: str
    keep: int  # how many of the newest stay, and the best

    @property
    def step(self) -> int:
        return int(self.cursor["step"])

    @property
    def temporary(self) -> Path:
        """Where the tensors are written before they are a checkpoint's."""
        return self.folder / f".step-{self.step:09d}.safetensors.{os.getpid()}.tmp"

    @property
    def path(self) -> Path:
        """The manifest."""
        return self.folder / f"step-{self.step:09d}.json"

    def write(self, pieces: Sequence[StatePiece]) -> None:
        """Write all tensors and commit; OSError if the disk is full, and nothing is left of it."""
        try:
            file = StateParts().open(pieces, self.temporary)
            for piece in pieces:
                file.put(piece)
            if error := file.close():
                raise error
            self.commit()
        finally:
            self.discard()

    def commit(self) -> None:
        """Make the tensors that were written a checkpoint, then keep only the newest and the best."""
        tensors = self.path.with_suffix(".safetensors")
        try:
            manifest = {
                "format": _FORMAT,
                "file": tensors.name,
                "bytes": self.temporary.stat().st_size,
                "sha256": file_sha256(self.temporary),
                "identity": self.identity,
                "cursor": self.cursor,
                **hash_state(sorted(TensorFile(self.temporary).items())),
            }
            manifest["seal"] = _seal(manifest)
            self.temporary.replace(tensors)
            sync_folder(self.folder)
        finally:
            self.discard()
        write_durably(self.path, (json.dumps(manifest, indent=1) + "\n").encode())
        prune(self.folder, self.keep, self.step, self.cursor["best_step"])

    def discard(self) -> None:
        """Remove what was written and is no checkpoint."""
        with suppress(OSError):
            self.temporary.unlink(missing_ok=True)


def load_checkpoint(path: Path) -> Saved:
    """Read one checkpoint by its manifest (or its tensors' file) and check it."""
    path = path.with_suffix(".json")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        name = manifest["file"]
        if name != Path(name).name:  # a manifest from elsewhere must not make us read other files
            raise ValueError(f"file='{name}' must be the name of a file beside it, without a folder")
        file = path.parent / name
        found, size = file_sha256(file), file.stat().st_size
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None
    if manifest.get("format") != _FORMAT:
        raise CheckpointError(
            f"{path}: format {manifest.get('format')} is not {_FORMAT}: another version of lockstep wrote it"
        )
    if manifest.pop("seal", None) != _seal(manifest):
        raise CheckpointError(f"{path}: damaged: its SHA-256 is not the one that was written with it")
    if found != manifest.get("sha256"):
        raise CheckpointError(
            f"{path.parent / manifest['file']}: damaged: {size} of {manifest.get('bytes')} bytes, "
            f"SHA-256 {found[:12]}… where the manifest says {str(manifest.get('sha256'))[:12]}…"
        )
    try:
        return Saved(path, manifest, TensorFile(file))
    except (SafetensorError, KeyError) as error:
        raise CheckpointError(f"{path.parent / manifest['file']}: not a safetensors file: {error}") from None


def load_newest(folder: Path, warn: Callable[[str], None]) -> Saved | None:
    """The newest undamaged checkpoint; None if there is none. `warn` is told of each damaged one."""
    paths = checkpoint_steps(folder)
    for step in sorted(paths, reverse=True):
        try:
            return load_checkpoint(paths[step])
        except CheckpointError as error:
            warn(f"{error}; taking the one before")
    if paths:
        raise CheckpointError(
            f"{folder}: none of its {len(paths)} checkpoints can be read: start again under another --name"
        )
    return None


def checkpoint_steps(folder: Path) -> dict[int, Path]:
    """The manifests in a folder, by step."""
    if not folder.is_dir():
        return {}
    return {int(m[1]): p for p in folder.iterdir() if (m := _MANIFEST.fullmatch(p.name))}


def write_durably(path: Path, data: bytes) -> None:
    """Replace a file durably: write a temporary file, sync it, rename it, sync the folder."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names of files in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _seal(manifest: dict[str, Any]) -> str:
    """SHA-256 of the manifest itself, since a damaged cursor would change bits as a damaged tensor would."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def prune(folder: Path, keep: int, step: int, best_step: int) -> None:
    """Remove `surplus_files`; manifests first."""
    for path in surplus_files(folder, keep, step, best_step):
        path.unlink(missing_ok=True)


def surplus_files(folder: Path, keep: int, step: int, best_step: int) -> list[Path]:
    """Files of checkpoints that are neither among the newest `keep` nor the best, and leftovers of crashes.

    Manifests come first. Checkpoints after `step` stay and do not count: a run that fell back from a damaged
    one must not lose its own newest checkpoints to it.
    """
    every = checkpoint_steps(folder)
    past = sorted(number for number in every if number <= step)
    surplus = {every[number] for number in past if number not in {*past[-keep:], best_step}}
    whole = {path.stem for path in every.values() if path not in surplus}
    dead = [path for path in folder.iterdir() if _LEFTOVER.fullmatch(path.name) and path.stem not in whole]
    return [*sorted(surplus), *sorted(dead)]
