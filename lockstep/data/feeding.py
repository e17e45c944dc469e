"""How a worker reads images: decode threads, and steps that are read ahead; set once, and changes no bit."""

from __future__ import annotations

import os
from dataclasses import dataclass

from lockstep.spec.launch import Launch

_MOST_THREADS = 32


@dataclass(frozen=True)
class Feeding:
    """`threads` decode, and `ahead` steps are read before they are needed."""

    threads: int
    ahead: int = 2


_chosen: list[Feeding] = []


def choose_feeding(launch: Launch) -> None:
    """Set this process's; 0 threads are the cores of this machine, shared by its workers."""
    workers = launch.world.local_size if launch.world else 1
    found = launch.decode_threads or max(len(os.sched_getaffinity(0)) // workers, 1)
    _chosen[:] = [Feeding(min(found, _MOST_THREADS), launch.read_ahead)]


def feeding() -> Feeding:
    """What was chosen, else a thread for every core."""
    return _chosen[0] if _chosen else Feeding(min(len(os.sched_getaffinity(0)), _MOST_THREADS))
