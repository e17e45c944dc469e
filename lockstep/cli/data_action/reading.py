"""`lockstep bench io`: how fast this machine reads a run's images, and how many GPUs that feeds."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from lockstep.cli.flag import add_json, check_new_file
from lockstep.cli.train import resolve
from lockstep.errors import BadInput
from lockstep.spec import Launch

IO = """\
Measure how fast the training images of a run are read here, by 1, 2, 4 … threads: their files from a cold
cache (the system is asked to drop them) and from a warm one, and pixels as training reads them, with its
random crops. Recipe and keys are as in `lockstep train`:

  lockstep bench io folder -o data.dir=PHOTOS -o data.augment=random_resized_crop,flip
  lockstep bench io -o data.name=pack -o data.dir=packed/ -o data.order=blocks:64 --gpu-rate 2800

With --picture, it also draws how long each kind of layer of the run's model computes in a step, and how long
the step waits for data: from this disk, and from one of --slow MB a second, for which reading is held back:

  lockstep bench io folder -o data.dir=PHOTOS --picture step.png --slow 5

With --gpu-rate, the images a second that one GPU trains with, it also says how many such GPUs are fed.
"""


def add_reading(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `bench io`."""
    parser.add_argument("--images", type=int, default=4096, metavar="N", help="at most; default: 4096")
    parser.add_argument(
        "--gpu-rate", type=float, metavar="IMG_S", help="images a second that one GPU trains with"
    )
    parser.add_argument(
        "--picture", type=Path, metavar="FILE.png", help="draw a step's time by kind of layer, and its wait"
    )
    parser.add_argument(
        "--slow", type=float, default=10.0, metavar="MB_S", help="the slow disk of --picture; default: 10"
    )
    add_json(parser)


def show_reading(options: argparse.Namespace) -> int:
    """Measure, and print a row for each way of reading and number of threads."""
    if options.images < 1:
        raise BadInput(f"--images {options.images} must be at least 1")
    if options.gpu_rate is not None and not options.gpu_rate > 0:
        raise BadInput(f"--gpu-rate {options.gpu_rate:g} must be above 0")
    if not options.slow > 0:
        raise BadInput(f"--slow {options.slow:g} must be above 0")
    if options.picture:
        check_new_file(options.picture, "--picture")
    run, _ = resolve(options, Launch())
    import torch

    from lockstep.data import open_data
    from lockstep.data.augment import check_augment, make_augment
    from lockstep.data.images.read_rate import measure_rates
    from lockstep.data.store import MemorySplit

    torch.set_num_threads(1)
    store = open_data(run)
    check_augment(run, store)
    if isinstance(store.train, MemorySplit):
        raise BadInput(f"data.name={run.data.name} is held in memory: nothing is read while training")
    augment = make_augment(run, store.shape, store.mean, store.std, train=store.train)
    cores = len(os.sched_getaffinity(0))
    threads = sorted({min(1 << power, cores) for power in range(cores.bit_length() + 1)})
    best = 0.0
    for rate in measure_rates(store.train, augment, threads, options.images):
        if rate.mb_s is None:
            best = max(best, rate.images_s)
        if options.json:
            print(json.dumps(vars(rate)))
        else:
            size = f"  {rate.mb_s:8,.1f} MB/s" if rate.mb_s is not None else ""
            many = f"{rate.threads} thread{'s' if rate.threads > 1 else ''}"
            print(f"{rate.what:18}  {many:>10}  {rate.images_s:9,.0f} img/s{size}", flush=True)
    if options.gpu_rate and not options.json:
        fed = best / options.gpu_rate
        print(f"this machine feeds {fed:.1f} GPUs that train {options.gpu_rate:,.0f} img/s each")
    if options.picture:
        from lockstep.cli.data_action.step_picture import draw_step

        told = draw_step(run, store, augment, options.picture, options.slow, options.images)
        print(json.dumps({"picture": told}) if options.json else told)
    return 0
