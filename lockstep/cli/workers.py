"""Starts several workers from one command, and decides which process is the main one; imports no torch."""

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
    """Return this worker's Launch with its world; if several workers are asked for, start them and exit."""
    if launch.world is None:
        world = read_world(os.environ)
        alone = world is not None and world.size == 1 and world.launcher != "lockstep"  # e.g. a batch system
        launch = replace(launch, world=None if alone else world)
    try:
        launch.check_run(run)
    except SpecError:
        if launch.rank:
            raise SystemExit(0) from None  # worker 0 reports the error and sets the exit code
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
        preload="lockstep.cli.listeners",
    )
    raise SystemExit(Launcher(job, _Screen()).run())


def note_rank(rank: int) -> None:
    """Note this process's rank in the last generation of a training, once that is over."""
    _last_ranks.append(rank)


def find_main() -> bool:
    """Whether this process should do what a script must do only once, such as print.

    Ranks change when workers are lost or join, so after a training it is the one that was worker 0 at the
    end. Before a training it is the process that starts our workers, which then run the same script again.
    """
    if _last_ranks:
        return _last_ranks[-1] == 0
    world = read_world(os.environ)
    return world is None or (world.launcher != "lockstep" and world.rank == 0)


def _token(launch: Launch) -> str:
    """The secret by which the launchers of one job know each other; a single launcher needs none."""
    token = os.environ.get("LOCKSTEP_TOKEN", "")
    if launch.rdzv and len(token) < _TOKEN_LENGTH:
        raise SpecError(
            f"--rdzv needs a secret of {_TOKEN_LENGTH} characters or more in LOCKSTEP_TOKEN, the same on "
            "every node: export LOCKSTEP_TOKEN=$(openssl rand -hex 16) on one and copy it"
        )
    return token


def _count(launch: Launch, threads: int) -> int:
    """The number of workers to start; `auto` is one per GPU, else one for every `threads` cores."""
    if launch.workers != "auto":
        return int(launch.workers or 1)
    gpus = 0
    if launch.device != "cpu":
        import torch

        gpus = torch.cuda.device_count()
    return gpus or max(len(os.sched_getaffinity(0)) // threads, 1)


class _Screen:
    """Prints the workers' lines on stderr, each as a whole and with the worker's name."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __call__(self, worker: str, line: str) -> None:
        with self._lock:
            named = worker and worker != "0" and not line.startswith("lockstep: ")
            print(f"[worker {worker}] {line}" if named else line, file=sys.stderr, flush=True)
