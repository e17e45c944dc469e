"""One worker of a run: it joins its group, proves that it will train to the same bits, and trains."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lockstep.comm.endpoint import join
from lockstep.comm.group import Group
from lockstep.errors import LockstepError
from lockstep.spec import Launch, Run
from lockstep.train.directory import RunDirectory
from lockstep.train.event import Listener
from lockstep.train.handshake import everywhere, prove_identity, share_state
from lockstep.train.journal import Journal
from lockstep.train.loop import Loop, Result
from lockstep.train.loss import Loss
from lockstep.train.numerics import plain_torch, prepare_device
from lockstep.train.resume import open_directory, recorded_identity
from lockstep.train.setup import Setup, set_up
from lockstep.train.state import TrainState


def fit(
    run: Run,
    launch: Launch,
    on_event: Listener,
    *,
    model: nn.Module | None = None,
    data: Any = None,
    loss: Loss | None = None,
) -> Result:
    """Train a Run from its beginning or from where it stopped, to its end, as one of its workers."""
    launch.check_workers(run)
    with plain_torch(), torch.random.fork_rng():
        # first: it sets the threads that all else uses
        device = prepare_device(
            launch.device, run.train.threads, launch.world.local_rank if launch.world else None
        )
        with _joined(launch, device) as group:
            recorded = everywhere(group, lambda: None if group.rank else recorded_identity(launch))
            recorded = json.loads(group.broadcast_bytes(json.dumps(recorded).encode()))
            setup = everywhere(group, lambda: set_up(run, device, model, data, loss, recorded))
            setup.warnings += _crowded(launch, run, device)
            setup.identity = prove_identity(group, setup.identity, launch)
            state = TrainState.begin(setup.model, run.optimizer, run.train.ema)
            directory = everywhere(group, lambda: _open(setup, state, launch, on_event))
            try:
                share_state(group, state)
                return Loop(
                    setup, state, launch, group, Journal(directory, on_event, setup, launch.trace)
                ).run()
            finally:
                if directory:
                    directory.close()


def _crowded(launch: Launch, run: Run, device: torch.device) -> list[str]:
    """Workers and threads on a CPU that get in each other's way."""
    cores, workers = len(os.sched_getaffinity(0)), launch.world.local_size if launch.world else 1
    if device.type != "cpu" or workers * run.train.threads <= cores:
        return []
    return [
        f"{workers} workers of {run.train.threads} threads on {cores} cores get in each other's way: use "
        "fewer workers; train.threads is part of the run"
    ]


@contextmanager
def _joined(launch: Launch, device: torch.device) -> Iterator[Group]:
    """The group of this process's world, left in good order if all workers leave it."""
    group = join(launch.world, launch.backend, device)
    try:
        yield group
    except BaseException as error:
        if isinstance(error, LockstepError):
            error.rank = group.rank
        if getattr(error, "everywhere", False):
            group.close()
        else:
            group.abort()
        raise
    group.close()


def _open(setup: Setup, state: TrainState, launch: Launch, on_event: Listener) -> RunDirectory | None:
    """Worker 0 opens the run's directory and takes the state from it, if the run goes on."""
    if launch.rank:
        return None
    directory, saved = open_directory(setup, launch, on_event)
    try:
        if saved:
            saved.restore(state)
    except BaseException:
        directory.close()
        raise
    return directory
