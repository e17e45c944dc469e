"""Starts several workers: of a training, or by `lockstep launch` of a script with a loop of its own.

It also decides which process is the main one. It imports no torch.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

from lockstep.cli.flag import add_elastic, add_num_workers
from lockstep.elastic.job import Job
from lockstep.elastic.worker_command import WorkerCommand, script_command
from lockstep.errors import GroupLost, SpecError
from lockstep.spec import Launch
from lockstep.spec.run import Run
from lockstep.spec.start.stop_signal import hold_warning
from lockstep.spec.world import World, read_world, slurm_job

if TYPE_CHECKING:
    Verbs = argparse._SubParsersAction[argparse.ArgumentParser]

_TOKEN_LENGTH = 16
_MANY_LANES = 1 << 20  # how many lanes a script has is known only when it runs
_last_ranks: list[int] = []  # this process's rank at the end of each training
_EPILOG = """\
The script joins its workers by `lockstep.lanes.join`; docs/loops.md shows how. Each worker runs the whole
script. A worker that is killed costs no step: the others compute its lanes, and a new one takes its place.
What worker 0 prints is shown; of the others only what they print on stderr.
"""


def add_parser(verbs: Verbs) -> None:
    """Add the verb and its flags."""
    parser = verbs.add_parser(
        "launch",
        help="start a script with a loop of its own as several workers",
        description="Start a script that uses lockstep.lanes as several workers: any number, the same bits.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_num_workers(parser, "the script's lanes")
    add_elastic(parser)
    parser.add_argument("script", metavar="SCRIPT", help="the path of a Python file")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="…", help="the script's own arguments")
    parser.set_defaults(handler=run_launch)


def run_launch(options: argparse.Namespace) -> int:
    """Start the workers and wait for them."""
    launch = Launch(
        workers=options.workers,
        min_workers=options.min_workers,
        wait_s=options.wait,
        restarts=options.restarts,
        rdzv=options.rdzv,
        nodes=options.nodes,
        tls=options.tls,
    )
    return launch_script(launch, [options.script, *options.arguments])


def start_workers(launch: Launch, run: Run) -> Launch:
    """Return this worker's Launch with its world; if several workers are asked for, start them and exit."""
    if launch.world is None:
        launch = replace(launch, world=_find_world(launch))
    try:
        launch.check_run(run)
    except SpecError:
        if launch.rank:
            raise SystemExit(0) from None  # worker 0 reports the error and sets the exit code
        raise
    if launch.world:
        return launch
    each = [plan.workers if plan.splits else None for plan in launch.plans]
    most = max(n or run.train.lanes * plan.least for n, plan in zip(each, launch.plans, strict=True))
    size = min(_count(launch, run.train.threads), most)
    if not launch.rdzv:
        size = launch.plan.for_workers(size).workers or size
    if size == 1 and not launch.rdzv:
        return launch
    sizes = launch.sizes(most, run.train.lanes)
    if sizes:  # with fewer there is no plan
        launch = replace(launch, min_workers=max(launch.min_workers, min(sizes)))
    job = _job(launch, size, most, "lockstep.cli.listeners")
    job = replace(job, sizes=sizes, is_split=launch.splits_state(run))
    try:
        raise SystemExit(_run(job))
    except GroupLost as lost:  # the first node, which nobody else can ask for
        from lockstep.cli.batch.requeue import queue_again

        if told := queue_again(lost, launch):
            print(f"lockstep: {told}", file=sys.stderr, flush=True)
        raise


def _find_world(launch: Launch) -> World | None:
    """The world that this process is a worker of; None if it is to start workers of its own, or is alone."""
    if slurm_job(os.environ):
        hold_warning()
    world = read_world(os.environ)
    if world is None or world.launcher == "lockstep":
        return world
    starts = launch.rdzv and world.launcher == "srun"  # each task is the launcher of its node
    return None if starts or world.size == 1 else world


def start_users(launch: Launch) -> Launch:
    """As `start_workers`, for workers that use a trained run: none is replaced, and a loss ends the job."""
    if launch.rdzv:
        raise SpecError("--rdzv is for training: over several hosts a trained run is used under torchrun")
    world = launch.world or read_world(os.environ)
    launch = launch.for_users(world, 0 if world else _count(launch, 1))
    size = launch.plan.workers or 1
    if world or size == 1:
        return launch
    job = Job(size, size, preload="lockstep.train.evaluation.joined_run", is_elastic=False)
    raise SystemExit(_run(job))


def launch_script(launch: Launch, script: list[str]) -> int:
    """Start the workers of a script with a loop of its own; `script` is its path and its arguments."""
    job = _job(launch, _count(launch, 1), _MANY_LANES, "lockstep.lanes")
    advice = "; a script with session.epochs(…, checkpoint=PATH) goes on from there when it is started again"
    job = replace(job, advice=advice, tells_losses=True)
    return _run(job, script_command(script))


def _run(job: Job, command: WorkerCommand | None = None) -> int:
    from lockstep.elastic.launcher import Launcher

    return Launcher(job, _Screen(), command).run()


def _job(launch: Launch, size: int, lanes: int, preload: str) -> Job:
    return Job(
        size,
        lanes,
        min_workers=launch.min_workers,
        wait_s=launch.wait_s,
        restarts=launch.restarts,
        rdzv=launch.endpoint if launch.rdzv else None,
        nodes=launch.num_nodes,
        tls=launch.tls,
        token=_token(launch),
        preload=preload,
    )


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
    if launch.num_workers != "auto":
        return int(launch.num_workers or 1)
    gpus = 0
    if launch.device != "cpu":
        import torch

        gpus = torch.cuda.device_count()
    return gpus or max(len(os.sched_getaffinity(0)) // threads, 1)


class _Screen:
    """Prints the workers' lines on stderr, each as a whole and with the worker's name."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._told: dict[str, str] = {}  # the worker that said each line of ours first

    def __call__(self, worker: str, line: str) -> None:
        with self._lock:
            ours = line.startswith("lockstep: ")
            if ours and worker and self._told.setdefault(line, worker) != worker:
                return  # every worker of a script raises the same error
            named = worker and worker != "0" and not ours
            print(f"[worker {worker}] {line}" if named else line, file=sys.stderr, flush=True)
