"""The identity of a run: everything that may change its bits, as one flat table that can be compared."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from lockstep.spec.run import Run
from lockstep.spec.run_file import to_table

Identity = dict[str, Any]

# Raised whenever a change of ours changes the bits of a run that was described in the same words.
VERSION = 5

# Came after VERSION 5 without a change of bits: a run that was begun without it goes on without it, and is
# compared by `numerics.probe`.
_LANE = "numerics.lane"

# Keys of a Run that say where things lie or when they are saved, and so cannot change a bit.
_NOT_IDENTITY = ("data.dir", "model.weights", "kernels.table", "checkpoint.every_steps", "checkpoint.keep")


# What the data was before, a row a change, where a run went on with other data (`--data-changed`).
HISTORY = "manifest.changed"

# Of the data, what the model is built for: with another it would be another model.
_OF_THE_MODEL = ("manifest.classes", "manifest.shape")


def make_identity(
    run: Run,
    *,
    data: Mapping[str, Any],
    model: Mapping[str, Any],
    fingerprint: Mapping[str, Any],
    kernels: Mapping[str, str],
) -> Identity:
    """Flatten the run, the data's manifest, the model's source and the numerics into one table."""
    whole = {
        **flatten("", to_table(run)),
        **flatten("manifest", data),
        **flatten("source", model),
        **flatten("numerics", fingerprint),
        **flatten("kernels", kernels),
        "numerics.version": VERSION,
    }
    return {key: whole[key] for key in sorted(whole) if key not in _NOT_IDENTITY}


def digest(identity: Identity) -> str:
    """The short name of an identity: SHA-256 of its canonical JSON."""
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def changed_data(theirs: Identity, ours: Identity) -> list[str]:
    """The keys that differ, if all of them only say which images there are; else none."""
    absent = object()
    keys = [k for k in theirs.keys() | ours.keys() if theirs.get(k, absent) != ours.get(k, absent)]
    excused = all(key.startswith("manifest.") and key not in _OF_THE_MODEL for key in keys)
    return sorted(keys) if excused else []


def add_change(theirs: Identity, ours: Identity, step: int) -> Identity:
    """Our identity, in which is said that up to `step` it was theirs."""
    before = {key: theirs.get(key) for key in changed_data(theirs, ours)}
    row = {"step": step, "identity": digest(theirs), "before": before}
    return dict(sorted({**ours, HISTORY: [*theirs.get(HISTORY, []), row]}.items()))


def is_digest_of(found: str, identity: Identity, step: int) -> bool:
    """Whether a state of `step` was saved under an identity, or under what that was then."""
    earlier = {row["identity"]: row["step"] for row in identity.get(HISTORY, [])}
    return found == digest(identity) or step <= earlier.get(found, -1)


def is_scripted(identity: Identity) -> bool:
    """Whether a script gave the module, the data or the loss, which no command line can."""
    own = ("source.model.", "source.loss", "manifest.sample_sha256")
    return any(key.startswith(own) for key in identity)


def differences(theirs: Identity, ours: Identity, where: tuple[str, str] = ("there", "here")) -> list[str]:
    """One line a field that differs: `train.batch: 256 there, 512 here`.

    The hash of a lane is compared only where both runs have one.
    """
    keys = sorted(theirs.keys() | ours.keys())
    if _LANE not in theirs or _LANE not in ours:
        keys = [key for key in keys if key != _LANE]
    absent = "absent"
    return [
        f"{key}: {theirs.get(key, absent)} {where[0]}, {ours.get(key, absent)} {where[1]}"
        for key in keys
        if theirs.get(key, absent) != ours.get(key, absent)
    ]


def flatten(prefix: str, table: Mapping[str, Any]) -> Identity:
    """Nested tables as dotted keys, their values as JSON gives them back."""
    flat: Identity = {}
    for key, value in table.items():
        path = f"{prefix}.{key}" if prefix else key
        if isinstance(value, Mapping):
            flat.update(flatten(path, value))
        else:
            flat[path] = list(value) if isinstance(value, tuple) else value
    return flat
