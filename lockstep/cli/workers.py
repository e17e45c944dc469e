"""How one command becomes several workers, and which process speaks for all; imports no torch."""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import replace

from lockstep.elastic.job import Job
from lockstep.elastic.launcher import Launcher
from lockstep.errors import SpecError
from lockstep.spec import Launch
from lockstep.spec.run import Run
from lockstep.spec.world import read_world

_TOKEN_LENGTH = 16
_last_ranks: list[int] = []  # this process's rank at the end of each training


def start_workers(launch: Launch, run: Run) -> Launch:
    """The Launch of one worker, its world filled in; if several are asked for, start them and exit."""
    if launch.world is None:
        world = read_world(os.environ)
        alone = world is not None and world.size == 1 and world.launcher != "lockstep"  # a batch system, say
        launch = replace(launch, world=None if alone else world)
    try:
        launch.check_run(run)
    except SpecError:
        if launch.rank:
            raise SystemExit(0) from None  # worker 0 says it and gives the code
        raise
    if launch.world:
        return launch
    size = min(_count(launch, run.train.threads), run.train.lanes)
    if size == 1 and not launch.rdzv:
        return launch
    job = Job(
        size,
        run.train.lanes,
        min_workers=launch.min_workers,
        wait_s=launch.wait_s,
        restarts=launch.restarts,
        rdzv=launch.endpoint if launch.rdzv else None,
        nodes=launch.num_nodes,
        token=_token(launch),
        preload="lockstep.cli.session",
    )
    raise SystemExit(Launcher(job, _Screen()).run())


def note_rank(rank: int) -> None:
    """A training is over, and this process was that worker in its last generation."""
    _last_ranks.append(rank)


def find_main() -> bool:
    """Whether this process should do what a script does once.

    Ranks change while workers are lost and join, so after a training worker 0 of its end is meant. Before it
    our own workers repeat what the process that starts them has done already.
    """
    if _last_ranks:
        return _last_ranks[-1] == 0
    world = read_world(os.environ)
    return world is None or (world.launcher != "lockstep" and world.rank == 0)


def _token(launch: Launch) -> str:
    """What launchers of one job prove to each other; alone, one needs none."""
    token = os.environ.get("LOCKSTEP_TOKEN", "")
    if launch.rdzv and len(token) < _TOKEN_LENGTH:
        raise SpecError(
            f"--rdzv needs a secret of {_TOKEN_LENGTH} characters or more in LOCKSTEP_TOKEN, the same on "
            "every node: export LOCKSTEP_TOKEN=$(openssl rand -hex 16) on one and copy it"
        )
    return token


def _count(launch: Launch, threads: int) -> int:
    """How many workers: as asked for; `auto` is one per GPU, else as many as the cores have threads for."""
    if launch.workers != "auto":
        return int(launch.workers or 1)
    gpus = 0
    if launch.device != "cpu":
        import torch

        gpus = torch.cuda.device_count()
    return gpus or max(len(os.sched_getaffinity(0)) // threads, 1)


class _Screen:
    """Shows the lines of workers on stderr, whole and with their name."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __call__(self, worker: str, line: str) -> None:
        with self._lock:
            named = worker and worker != "0" and not line.startswith("lockstep: ")
            print(f"[worker {worker}] {line}" if named else line, file=sys.stderr, flush=True)
