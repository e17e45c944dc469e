"""Opens the trained run that `lockstep eval`, `predict` or `export` names."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lockstep.errors import BadInput

if TYPE_CHECKING:
    from lockstep.cli.joined_run import JoinedRun
    from lockstep.runs.trained_run import Trained
    from lockstep.spec import Launch
    from lockstep.spec.world import World


@contextmanager
def joined_run(options: argparse.Namespace, launch: Launch) -> Iterator[JoinedRun]:
    """Open it together with the other workers that a launcher started, without its weights."""
    from lockstep.cli.joined_run import join_run

    with join_run(launch, lambda world: open_run(options, launch.device, False, world)) as joined:
        yield joined


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
