"""`lockstep bench baselines`: one training run by every means there is here, side by side."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.cli.flag import add_device, add_json, check_new_file
from lockstep.cli.lab.clean_end import end_cleanly
from lockstep.errors import BadInput
from lockstep.spec.run import PRECISIONS

if TYPE_CHECKING:
    from lockstep.lab.baselines.baseline_task import BaselineTask
    from lockstep.lab.baselines.contest import Outcome

BASELINES = """\
Train one network by every means there is on this machine: sequential C++, the same under MPI, CUDA by hand,
PyTorch, TensorFlow, JAX, Lightning and Lockstep:

  lockstep bench baselines                                   less than two minutes on two slow cores
  lockstep bench baselines --images 8192 --epochs 4          long enough to learn something
  lockstep bench baselines --only cpp,torch,lockstep --picture baselines.png
  lockstep bench baselines --precision bf16 --images 65536 --batch 1024   on a GPU

All have the same network (emotion48), images, order of samples, batch, plain SGD and initial weights, so
those that compute in the same precision start with the same loss. Each is a process of its own, which cannot
use more cores than told. What is not installed is said, and the others run.
"""
_SIZES = {
    "images": ("for training; a quarter as many for tests; ", {"CPU": 512, "GPU": 8192}),
    "epochs": ("", {"CPU": 2, "GPU": 4}),
    "batch": ("", {"CPU": 64, "GPU": 128}),
}
_LANE = 4  # the fewest images of a lane, if there are several
_MOST = {"images": 1 << 22, "epochs": 1000, "batch": 1 << 16}


def add_baselines(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `bench baselines`."""
    add_device(parser)
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32", help="on a GPU; default: fp32")
    for name, text in _SIZES.items():
        usual = " or ".join(f"{value} on a {kind}" for kind, value in text[1].items())
        parser.add_argument(f"--{name}", type=int, metavar="N", help=f"{text[0]}default: {usual}")
    parser.add_argument("--rate", type=float, default=0.1, help="of learning; default: 0.1")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of weights and order; default: 0")
    parser.add_argument("--cores", type=int, metavar="N", help="that a contestant may use; default: all")
    parser.add_argument("--processes", type=int, default=4, metavar="N", help="of MPI; default: 4")
    parser.add_argument("--only", metavar="NAME,NAME…", help="some of the contestants")
    parser.add_argument("--picture", type=Path, metavar="FILE.png", help="draw the times")
    add_json(parser)


def show_baselines(options: argparse.Namespace) -> int:
    """Hold all races, then print a table, and draw it if asked."""
    from lockstep.cli.lab.baseline_files import write_files
    from lockstep.cli.lab.baseline_table import find_strays, measure_share, records_of, tell_baselines
    from lockstep.kernels.numerics import prepare_device
    from lockstep.lab.baselines.referee import find_obstacle, hold_race, list_starts

    device = prepare_device(options.device, 1).type
    for name, (_, usual) in _SIZES.items():
        if getattr(options, name) is None:
            setattr(options, name, usual["GPU" if device == "cuda" else "CPU"])
    only = _check(options, device)
    found: dict[str, Outcome] = {}
    with end_cleanly(), tempfile.TemporaryDirectory(prefix="lockstep-baselines-") as folder:
        task = _make_task(options, device, folder)
        starts = list_starts(task.device, task.cores, task.processes, only)
        if any(not find_obstacle(start, task, bool(only)) for start in starts):
            write_files(task)
        for start in starts:
            why = find_obstacle(start, task, is_asked_for=bool(only))
            outcome = why or hold_race(start, task)
            if isinstance(outcome, str):
                _say(f"left out: {start.name}: {outcome}")
                continue
            found[start.name] = outcome
            _say(f"{start.name}: {outcome.train_s:.2f} s of training, {outcome.startup_s:.1f} s before it")
    strays, share = find_strays(found), measure_share(found, task)
    if options.json:
        print(json.dumps(records_of(found, task, share), indent=1))
    else:
        print("\n".join(tell_baselines(found, task, share)))
    for line in strays:
        _say(line)
    if options.picture and found:
        from lockstep.report.baseline_picture import draw_baselines

        draw_baselines(options.picture, {name: each.train_s for name, each in found.items()})
        _say(f"drew {options.picture}")
    return 1 if strays else 0


def _check(options: argparse.Namespace, device: str) -> tuple[str, ...]:
    """Refuse what cannot be; gives the contestants that were asked for."""
    from lockstep.lab.baselines.referee import ENTRANTS

    for name, most in _MOST.items():
        value = getattr(options, name)
        if not 1 <= value <= most:
            raise BadInput(f"--{name} {value} must be from 1 to {most}")
    if options.batch > options.images:
        raise BadInput(f"--batch {options.batch} is more than --images {options.images}: give fewer")
    if device == "cpu" and options.precision != "fp32":
        raise BadInput(f"--precision {options.precision} needs a GPU: on a CPU all compute in fp32")
    if not 0 < options.rate < inf:
        raise BadInput(f"--rate {options.rate} must be above 0, and finite")
    if options.seed < 0:
        raise BadInput(f"--seed {options.seed} must be 0 or more")
    here = len(os.sched_getaffinity(0))
    if options.cores is not None and not 1 <= options.cores <= here:
        raise BadInput(f"--cores {options.cores}: this machine lets us use {here}: give 1 to {here}")
    if options.picture:
        check_new_file(options.picture, "--picture")
    known = tuple(entrant.key for entrant in ENTRANTS)
    only = known if options.only is None else tuple(word.strip() for word in options.only.split(","))
    for name in only:
        if name not in known:
            raise BadInput(f"--only {name}: there is no such contestant; there are {', '.join(known)}")
    if "mpi" in only and (not 1 <= options.processes <= 64 or options.batch % options.processes):
        raise BadInput(
            f"--processes {options.processes} must be from 1 to 64 and divide --batch {options.batch}: "
            "each computes as many images"
        )
    return only if options.only is not None else ()


def _make_task(options: argparse.Namespace, device: str, folder: str) -> BaselineTask:
    from lockstep.lab.baselines.baseline_task import BaselineTask

    cores = options.cores or len(os.sched_getaffinity(0))
    lanes = 1
    while device == "cpu" and 2 * lanes <= cores and options.batch % (2 * _LANE * lanes) == 0:
        lanes *= 2
    return BaselineTask(
        folder=folder,
        images=options.images,
        tests=max(options.images // 4, 1),
        batch=options.batch,
        epochs=options.epochs,
        rate=options.rate,
        seed=options.seed,
        device=device,
        precision=options.precision,
        cores=cores,
        processes=options.processes,
        lanes=lanes,
    )


def _say(text: str) -> None:
    print(f"lockstep: {text}", file=sys.stderr, flush=True)
