"""The identity of a run: its settings, data, model and fingerprint as one flat table that can be compared."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from lockstep.spec.rule.loss_scale import GROWTH, START
from lockstep.spec.run import Run
from lockstep.spec.run_file import to_table

Identity = dict[str, Any]

# Raised whenever a change of Lockstep's code changes the bits of a run whose other keys stay the same.
VERSION = 5

# This key was added during VERSION 5 without a change of bits. A run that began without it is compared
# without it, by `numerics.probe`.
_LANE = "numerics.lane"

# Keys that were added during VERSION 5; at these values they change no bit. They are left out then, so that
# the identity of such a run is the one from before there were such keys.
_ADDED: dict[str, object] = {
    "train.bands": 1,
    "train.slices": 1,
    "train.compress": "none",
    "train.compress_after": 0,
    "train.local_steps": 1,
    "train.clip_value": 0.0,
    "train.loss_scale": START,
    "train.scale_growth": GROWTH,
    "data.order": "shuffled",
    "data.repeats": 1,
    "train.class_weights": "none",
    "evaluate.best": "auto",
    "evaluate.patience": 0,
    "optimizer.decay_norms": True,
    "optimizer.scale": "none",
    "optimizer.base_batch": 256,
    "optimizer.rates": [],
    "model.freeze": [],
}

# Keys of a Run that cannot change a bit: where files are, when checkpoints are saved, what is computed twice.
# The numbers of data.normalize are in the manifest.
_NOT_IDENTITY = (
    *("data.dir", "data.normalize", "model.weights", "kernels.table"),
    *("checkpoint.every_steps", "checkpoint.keep", "train.recompute"),
)


# The history of a run's data: one row for each time that it was resumed with `--data-changed`.
HISTORY = "manifest.changed"

# The hash of the weights that a module of the user's starts with.
INITIAL_WEIGHTS = "source.model.weights_sha256"

# Keys of the data that the model is built for: if they change, it is another model.
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
    if whole["data.name"] == "pack":  # of a folder's files: the images are those of the folder
        whole["data.name"] = data["name"]
    if not run.evaluate.patience:  # then what is measured decides nothing
        whole.pop("evaluate.metrics")
    left_out = {*_NOT_IDENTITY, *(key for key, value in _ADDED.items() if whole[key] == value)}
    return {key: whole[key] for key in sorted(whole) if key not in left_out}


def digest(identity: Identity) -> str:
    """The short name of an identity: SHA-256 of its canonical JSON."""
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def changed_data(theirs: Identity, ours: Identity) -> list[str]:
    """The keys that differ, if all of them concern only which images there are; otherwise an empty list."""
    keys = _different_keys(theirs, ours)
    excused = all(key.startswith("manifest.") and key not in _OF_THE_MODEL for key in keys)
    return keys if excused else []


def add_change(theirs: Identity, ours: Identity, step: int) -> Identity:
    """Our identity, with a row of history: up to `step`, the run had their identity."""
    before = {key: theirs.get(key) for key in changed_data(theirs, ours)}
    row = {"step": step, "identity": digest(theirs), "before": before}
    return dict(sorted({**ours, HISTORY: [*theirs.get(HISTORY, []), row]}.items()))


def is_digest_of(found: str, identity: Identity, step: int) -> bool:
    """Whether `found` is the digest of this identity, or of the one that the run had at `step`."""
    earlier = {row["identity"]: row["step"] for row in identity.get(HISTORY, [])}
    return found == digest(identity) or step <= earlier.get(found, -1)


def is_scripted(identity: Identity) -> bool:
    """Whether a script gave the run its own module, data or loss, which the command line cannot do."""
    own = ("source.model.", "source.loss", "source.augment", "source.metrics.", "manifest.sample_sha256")
    return any(key.startswith(own) for key in identity)


def differences(theirs: Identity, ours: Identity, where: tuple[str, str] = ("there", "here")) -> list[str]:
    """One line for each field that differs, such as `train.batch: 256 there, 512 here`.

    The hash of a lane is compared only if both runs have one.
    """
    return [
        f"{key}: {theirs.get(key, absent)} {where[0]}, {ours.get(key, absent)} {where[1]}"
        for key in _different_keys(theirs, ours)
        for absent in (_ADDED.get(key, "absent"),)
    ]


def _different_keys(theirs: Identity, ours: Identity) -> list[str]:
    absent = object()
    keys = [k for k in theirs.keys() | ours.keys() if theirs.get(k, absent) != ours.get(k, absent)]
    return sorted(key for key in keys if key != _LANE or (key in theirs and key in ours))


def flatten(prefix: str, table: Mapping[str, Any]) -> Identity:
    """Flatten nested tables into dotted keys; tuples become lists, as in JSON."""
    flat: Identity = {}
    for key, value in table.items():
        path = f"{prefix}.{key}" if prefix else key
        if isinstance(value, Mapping):
            flat.update(flatten(path, value))
        else:
            flat[path] = list(value) if isinstance(value, tuple) else value
    return flat
