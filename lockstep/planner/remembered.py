"""What `lockstep probe` and `lockstep profile` measured on this machine last, kept in the user's cache.

Every later run finds it there, and says in its summary how long a step was predicted to take.
"""

from __future__ import annotations

import hashlib
import os
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from lockstep.errors import SpecError
from lockstep.spec.cluster import Cluster
from lockstep.spec.cluster_file import read_cluster, write_cluster
from lockstep.spec.profile import Profile, read_profile, write_profile
from lockstep.spec.run import Run


def remember_cluster(cluster: Cluster) -> None:
    """Keep this machine's figures; a cache that cannot be written is left alone."""
    with suppress(OSError, RuntimeError):  # RuntimeError: no home is known
        path = _cluster_path(cluster.worker.device)
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, write_cluster(cluster))


def recall_cluster(device: str) -> Cluster | None:
    """The figures of a machine with such devices; None if it was never probed."""
    path = _cluster_path(device)
    try:
        return read_cluster(path) if path.is_file() else None
    except (OSError, SpecError):  # of another version
        return None


def recall_latest() -> Cluster | None:
    """The machine that was probed last with this cache; None if none was."""
    try:
        files = sorted((_folder() / "clusters").glob("*.toml"), key=lambda path: path.stat().st_mtime)
        return read_cluster(files[-1]) if files else None
    except (OSError, RuntimeError, SpecError):
        return None


def remember_profile(run: Run, profile: Profile) -> None:
    """Keep what a run's layers and steps take here."""
    with suppress(OSError, RuntimeError):
        path = _profile_path(run, profile.shape, profile.device)
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(f".{os.getpid()}")
        write_profile(beside, profile)
        beside.replace(path)


def recall_profile(run: Run, shape: tuple[int, ...], device: str) -> Profile | None:
    """What was measured of the same run on such a device; None if it was not."""
    path = _profile_path(run, shape, device)
    try:
        return read_profile(path) if path.is_file() else None
    except (OSError, SpecError):
        return None


def as_profiled(run: Run) -> Run:
    """The run whose profile serves for this one: it sends gradients as they are.

    What compression adds to a step follows from the cluster, so one profile serves every way to compress.
    """
    return replace(run, train=replace(run.train, compress="none", compress_after=0))


def _folder() -> Path:
    if own := os.environ.get("LOCKSTEP_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lockstep"


def _cluster_path(device: str) -> Path:
    return _folder() / "clusters" / f"{re.sub(r'[^A-Za-z0-9]+', '-', device)}.toml"


def _profile_path(run: Run, shape: tuple[int, ...], device: str) -> Path:
    """By all that a step's seconds depend on."""
    what = (
        run.model,
        replace(as_profiled(run).train, epochs=1),
        run.kernels,
        run.optimizer.name,
        tuple(shape),
        device,
    )
    name = hashlib.sha256(repr(what).encode()).hexdigest()[:16]
    return _folder() / "profiles" / f"{run.model.name.replace(':', '-').replace('/', '-')}-{name}.json"


def _replace(path: Path, text: str) -> None:
    beside = path.with_suffix(f".{os.getpid()}")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)
