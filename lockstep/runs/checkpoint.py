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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as parse_tensors
from safetensors.torch import save as format_tensors
from torch import Tensor

from lockstep.errors import CheckpointError
from lockstep.runs.train_state import TrainState, state_hashes

_FORMAT = 1
_MANIFEST = re.compile(r"step-(\d{9,})\.json")


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was read and whose hash is correct."""

    path: Path
    manifest: dict[str, Any]
    tensors: dict[str, Tensor]

    def restore(self, state: TrainState) -> None:
        """Copy the checkpoint into a state of the same model and optimizer."""
        try:
            state.load_tensors(self.tensors)
            state.load_cursor(self.manifest["cursor"])
        except (KeyError, TypeError, RuntimeError) as error:
            raise CheckpointError(f"{self.path}: does not fit this model or optimizer: {error}") from None


def save_checkpoint(
    folder: Path, state: TrainState, identity: str, keep: int, tensors: dict[str, Tensor] | None = None
) -> Path:
    """Write a checkpoint, then keep only the newest `keep` and the best; OSError if the disk is full.

    `tensors` are those of the whole state, if this worker has only a part of it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = state.tensors() if tensors is None else tensors
    data = format_tensors(tensors)
    tensors_path = folder / f"step-{state.step:09d}.safetensors"
    manifest = {
        "format": _FORMAT,
        "file": tensors_path.name,
        "bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
        "identity": identity,
        "cursor": state.cursor(),
        **state_hashes(tensors),
    }
    manifest["seal"] = _seal(manifest)
    write_durably(tensors_path, data)
    path = tensors_path.with_suffix(".json")
    write_durably(path, (json.dumps(manifest, indent=1) + "\n").encode())
    prune(folder, keep, state.step, state.best_step)
    return path


def load_checkpoint(path: Path) -> Saved:
    """Read one checkpoint by its manifest (or its tensors' file) and check it."""
    path = path.with_suffix(".json")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        name = manifest["file"]
        if name != Path(name).name:  # a manifest from elsewhere must not make us read other files
            raise ValueError(f"file='{name}' must be the name of a file beside it, without a folder")
        data = (path.parent / name).read_bytes()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None
    if manifest.get("format") != _FORMAT:
        raise CheckpointError(
            f"{path}: format {manifest.get('format')} is not {_FORMAT}: another version of lockstep wrote it"
        )
    if manifest.pop("seal", None) != _seal(manifest):
        raise CheckpointError(f"{path}: damaged: its SHA-256 is not the one that was written with it")
    found = hashlib.sha256(data).hexdigest()
    if found != manifest.get("sha256"):
        raise CheckpointError(
            f"{path.parent / manifest['file']}: damaged: {len(data)} of {manifest.get('bytes')} bytes, "
            f"SHA-256 {found[:12]}… where the manifest says {str(manifest.get('sha256'))[:12]}…"
        )
    try:
        return Saved(path, manifest, parse_tensors(data))
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
    handle = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _seal(manifest: dict[str, Any]) -> str:
    """SHA-256 of the manifest itself, since a damaged cursor would change bits as a damaged tensor would."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def prune(folder: Path, keep: int, step: int, best_step: int) -> None:
    """Remove checkpoints that are neither among the newest `keep` nor the best, and leftovers of crashes.

    Manifests are removed first. Checkpoints after `step` stay and do not count: a run that fell back from a
    damaged one must not lose its own newest checkpoints to it.
    """
    paths = {number: path for number, path in checkpoint_steps(folder).items() if number <= step}
    wanted = {*sorted(paths)[-keep:], best_step}
    for number, path in paths.items():
        if number not in wanted:
            path.unlink(missing_ok=True)
    manifests = {path.stem for path in checkpoint_steps(folder).values()}
    for path in folder.iterdir():
        dead = path.suffix == ".tmp" or (path.suffix == ".safetensors" and path.stem not in manifests)
        if dead and path.name.lstrip(".").startswith("step-"):
            path.unlink(missing_ok=True)
