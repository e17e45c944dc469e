"""How a worker reads images: decode threads, steps read ahead, a cache; set once, and changes no bit."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import SpecError
from lockstep.spec.launch import Launch

_MOST_THREADS = 32


@dataclass(frozen=True)
class PixelSpace:
    """A folder for decoded pixels, and how many bytes they may take there."""

    folder: Path
    num_bytes: int


@dataclass(frozen=True)
class Feeding:
    """`threads` decode, `ahead` steps are read before they are needed, `cache` keeps pixels."""

    threads: int
    ahead: int = 2
    cache: PixelSpace | None = None


_chosen: list[Feeding] = []


def choose_feeding(launch: Launch) -> None:
    """Set this process's; 0 threads are the cores of this machine, shared by its workers."""
    workers = launch.world.local_size if launch.world else 1
    found = launch.decode_threads or max(len(os.sched_getaffinity(0)) // workers, 1)
    _chosen[:] = [Feeding(min(found, _MOST_THREADS), launch.read_ahead, _find_space(launch))]


def _find_space(launch: Launch) -> PixelSpace | None:
    folder = launch.pixel_cache
    if folder is None:
        return None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "lock").touch()
    except OSError as error:
        raise SpecError(f"--pixel-cache {folder}: {error.strerror}: name a folder on a local disk") from None
    return PixelSpace(folder, int(launch.pixel_cache_gb * 1e9))


def feeding() -> Feeding:
    """What was chosen, else a thread for every core."""
    return _chosen[0] if _chosen else Feeding(min(len(os.sched_getaffinity(0)), _MOST_THREADS))
