"""Joins the workers of a script, however they were launched, and prepares torch for equal bits."""

from __future__ import annotations

import atexit
import os
import sys
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from lockstep.comm.group import Group
from lockstep.elastic.worker_groups import WorkerGroups
from lockstep.kernels.numerics import prepare_device
from lockstep.lanes.lane_sampler import check_lanes
from lockstep.lanes.script import Script
from lockstep.lanes.session import Session
from lockstep.spec.system import check_system
from lockstep.spec.world import read_world


def join(
    *objects: Any,
    lanes: int = 8,
    seed: int = 0,
    device: str = "auto",
    threads: int = 1,
    tf32: bool = False,
    backend: str = "auto",
    trace: str | Path | None = None,
) -> Session:
    """Join the workers that torchrun, mpirun or `lockstep launch` started; else be the only one.

    `objects` are set up, as by `session.setup`. `lanes` is the number of equal parts of each batch, a power
    of two, and the most workers that there can be. Together with `seed` and `threads` it decides the bits;
    the number of workers does not. All generators of torch, of `random` and of numpy are seeded. `trace`
    names a file that gets a hash for every step.
    """
    check_system()
    check_lanes(lanes)
    world = read_world(os.environ)
    if world is not None and world.size == 1 and world.launcher != "lockstep":
        world = None
    chosen = prepare_device(device, threads, world.local_rank if world else None, tf32)
    groups = WorkerGroups(world, backend, chosen)
    script = Script(groups, chosen, lanes, seed, Path(trace) if trace else None)
    session = Session(script, world.rank, world.size) if world else Session(script)
    session.setup(*objects)
    if world and world.stdout_fd >= 0:
        session.script.rounds.on_enter = partial(_take_output, world.stdout_fd)
    _close_at_exit(session)
    return session


def _take_output(stdout_fd: int, group: Group) -> None:
    """Let worker 0 print on the launcher's output; what the others print is dropped."""
    if group.rank == 0:
        sys.stdout.flush()  # into nothing, what this worker has printed so far
        os.dup2(stdout_fd, 1)


def _close_at_exit(session: Session) -> None:
    """Close the session when the script ends, unless it ends by an error: then the others see that."""
    before = sys.excepthook

    def note(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        atexit.unregister(session.close)
        before(kind, error, trace)

    sys.excepthook = note
    atexit.register(session.close)
