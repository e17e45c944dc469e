"""Opens the trained run that `lockstep eval`, `predict` or `export` names."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lockstep.cli.launch import note_rank
from lockstep.errors import BadInput, GroupLost, LockstepError

if TYPE_CHECKING:
    from lockstep.kernels.loss import Loss
    from lockstep.runs.trained_run import Trained
    from lockstep.spec import Launch
    from lockstep.spec.world import World
    from lockstep.train.evaluation.host_evaluate import Evaluation
    from lockstep.train.evaluation.joined_run import JoinedRun
    from lockstep.train.evaluation.metric import Metrics

_PATIENCE_S = 3.0


@contextmanager
def joined_run(launch: Launch, opens: Callable[[World], Trained]) -> Iterator[JoinedRun]:
    """A run that several workers have opened, without its weights; worker 0 may print."""
    from lockstep.elastic.worker_groups import WorkerGroups
    from lockstep.train.evaluation.joined_run import join_run

    try:
        with join_run(launch, WorkerGroups, opens) as joined:
            if joined.is_main and launch.world and launch.world.stdout_fd >= 0:
                sys.stdout.flush()
                os.dup2(launch.world.stdout_fd, 1)
            yield joined
            note_rank(joined.group.rank)
    except GroupLost as error:
        time.sleep(_PATIENCE_S)  # meanwhile the launcher ends us, so that only the failed worker reports
        raise LockstepError("another worker was lost: run the same command again") from error


def evaluate_joined(
    launch: Launch, opened: dict[str, Any], data: Any, loss: Loss | None, metrics: Metrics | None
) -> Evaluation:
    """`lockstep.evaluate` by several workers; `opened` are arguments of `open_trained`."""
    from lockstep.runs.trained_run import open_trained
    from lockstep.train.evaluation.evaluate import open_given_data

    def opens(world: World) -> Trained:
        rank = world.local_rank
        return open_trained(launch.runs_dir, device=launch.device, loads=False, local_rank=rank, **opened)

    with joined_run(launch, opens) as joined:
        split = joined.agree(lambda: open_given_data(joined.trained, data).test)
        return joined.evaluate(split, loss, metrics)


def open_part(options: argparse.Namespace, world: World) -> Trained:
    """Open it as one of several workers, without its weights."""
    return open_run(options, options.device, loads=False, world=world)


def open_run(
    options: argparse.Namespace, device: str, loads: bool = True, world: World | None = None
) -> Trained:
    """Open the run that the arguments name; say if it is not finished, or if there is a later one."""
    from lockstep.runs.directory import RunDirectory
    from lockstep.runs.trained_run import open_trained

    trained = open_trained(
        options.runs_dir,
        options.run,
        device=device,
        which=options.checkpoint,
        loads=loads,
        local_rank=world.local_rank if world else None,
    )
    if not trained.step:
        raise BadInput(f"{trained.directory} was stopped before its first step: there are no trained weights")
    if world and world.rank:
        return trained  # worker 0 tells
    if RunDirectory(trained.directory).summary() is None:
        print(f"{trained.directory} is not finished: the weights of step {trained.step}", file=sys.stderr)
    later = RunDirectory.newest(trained.directory.parent, options.run)
    if later and later.path.name != trained.directory.name:
        print(f"{trained.directory} is used; {later.path} is a later run of that name", file=sys.stderr)
    return trained
