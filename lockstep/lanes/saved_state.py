"""A checkpoint of a user's own loop: one safetensors file with the whole state and where the script is.

Its metadata holds the table of the state, the cursor, and a SHA-256 over both and the tensors. The file is
written under another name, synced and renamed, so there is always a whole one.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save as format_tensors
from torch import Tensor

from lockstep.errors import CheckpointError
from lockstep.lanes.state_tree import PackedState
from lockstep.runs.checkpoint import write_durably
from lockstep.runs.tensor_difference import locate

_FORMAT, _KEY = 1, "lockstep"


@dataclass(frozen=True)
class SavedState:
    """What a file holds."""

    state: PackedState
    cursor: dict[str, Any]
    facts: dict[str, Any]


def write_state(path: Path, saved: SavedState) -> None:
    """Write or replace a file durably; OSError if the disk is full."""
    tensors = {name: tensor.cpu().contiguous().clone() for name, tensor in saved.state.tensors.items()}
    manifest = {
        "format": _FORMAT,
        "table": saved.state.table,
        "cursor": saved.cursor,
        "facts": saved.facts,
        "sha256": PackedState(saved.state.table, tensors).sha256(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(manifest)
    seal = hashlib.sha256(text.encode()).hexdigest()
    write_durably(path, format_tensors(tensors, {_KEY: text, "seal": seal}))


def read_state(path: Path) -> SavedState:
    """Read a file and check its hashes."""
    tensors: dict[str, Tensor] = {}
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            for name in file.keys():  # noqa: SIM118
                tensors[name] = file.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None
    if _KEY not in metadata:
        raise CheckpointError(f"{path}: was not written by session.save")
    text = metadata[_KEY]
    if hashlib.sha256(text.encode()).hexdigest() != metadata.get("seal"):
        raise CheckpointError(f"{path}: damaged: its SHA-256 is not the one that was written with it")
    manifest = json.loads(text)
    if manifest["format"] != _FORMAT:
        raise CheckpointError(f"{path}: format {manifest['format']} is of another version of lockstep")
    state = PackedState(manifest["table"], tensors)
    if state.sha256() != manifest["sha256"]:
        raise CheckpointError(f"{path}: damaged: its SHA-256 is not the one that was written with it")
    return SavedState(state, manifest["cursor"], manifest["facts"])


def verify(a: str | Path, b: str | Path) -> str:
    """Where two files of `session.save`, or two traces (`….jsonl`), first differ; empty if nowhere."""
    if Path(a).suffix == ".jsonl":
        return _compare_traces(Path(a), Path(b))
    one, two = read_state(Path(a)), read_state(Path(b))
    if one.cursor["step"] != two.cursor["step"]:
        return f"{a} is of step {one.cursor['step']}, {b} of step {two.cursor['step']}"
    found = locate(one.cursor["step"], one.state.tensors, two.state.tensors)
    if found.names:
        first = found.element
        values = f" at {first.index}: {first.values[0]} and {first.values[1]}" if first else ""
        return f"{len(found.names)} of {found.num_tensors} tensors differ, first {found.name}{values}"
    is_same = one.state.table == two.state.table
    return "" if is_same else "all tensors are the same, but other values of the state differ"


def _compare_traces(a: Path, b: Path) -> str:
    """The last row of each step counts: a step before a loss may stand there twice."""
    sides = []
    for path in (a, b):
        try:
            rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: cannot be read: {error}") from None
        sides.append({row["step"]: row for row in rows})
    common = sorted(sides[0].keys() & sides[1].keys())
    if not common:
        return f"{a} and {b} have no step in common"
    first = next((step for step in common if sides[0][step] != sides[1][step]), None)
    return "" if first is None else f"step {first} is the first that differs"
