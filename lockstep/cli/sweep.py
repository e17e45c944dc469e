"""`lockstep sweep`: every combination of values is a run of its own; several at once, stopped and resumed."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.cli.flag import (
    add_device,
    add_json,
    add_num_workers,
    add_run_keys,
    add_runs_dir,
    check_new_file,
)
from lockstep.errors import BadInput, Interrupted

if TYPE_CHECKING:
    from lockstep.cli.search.outcome import Outcome
    from lockstep.cli.search.pool_view import PoolView
    from lockstep.cli.search.run_pool import RunPool
    from lockstep.cli.search.swept_run import SweptRun
    from lockstep.spec.search.sweep import Sweep

    Verbs = argparse._SubParsersAction[argparse.ArgumentParser]

_SEARCHES = ("grid", "random", "halving")
_TEXT = """\
Train a run for each combination of values, several at once, and print what came out, the best first:

  lockstep sweep -o train.batch=64,128,256 -o optimizer.lr=0.02,0.05
  lockstep sweep cifar10 -o optimizer.lr=0.1,0.2 --seeds 0,1,2 --picture sweep.png
  lockstep sweep cifar10 -o optimizer.lr=0.01..1 --search random --samples 12
  lockstep sweep cifar10 -o optimizer.lr=0.05,0.1,0.2,0.4 -o data.val_fraction=0.1 --search halving

Each is what `lockstep train` does with these values, in RUNS_DIR/NAME/VALUES. Stopped by a signal, all runs
save their state; the same command goes on, and one with more values or seeds adds to it. Commas within
brackets or quotes belong to a value: -o 'data.augment=["flip","crop"],["flip"]'.
"""


def add_parser(verbs: Verbs) -> None:
    """Add the verb and its flags."""
    parser = verbs.add_parser(
        "sweep",
        help="train a run for each combination of values",
        description=_TEXT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_run_keys(parser)
    parser.add_argument("--seeds", metavar="N,N", help="train each combination with each of these seeds")
    parser.add_argument("--name", help="the sweep's name; default: RECIPE-sweep")
    add_runs_dir(parser)
    parser.add_argument(
        "--jobs",
        default="auto",
        metavar="N|auto",
        help="how many runs at once; default: auto, as many as have cores or GPUs of their own",
    )
    add_device(parser)
    add_num_workers(parser, "train.lanes")
    _add_search(parser)
    parser.add_argument(
        "--picture", type=Path, metavar="FILE.png", help="draw accuracy by value, step and time"
    )
    add_json(parser)
    parser.set_defaults(handler=run_sweep)


def _add_search(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("search")
    group.add_argument(
        "--search",
        choices=_SEARCHES,
        default="grid",
        help="grid: all combinations, the default; random: some, also of ranges; halving: all begin, and "
        "the better ones by validation images go on",
    )
    group.add_argument("--samples", type=int, metavar="N", help="how many combinations are drawn")
    group.add_argument("--seed", type=int, metavar="N", help="of the draws; default: 0")
    group.add_argument("--rungs", type=int, metavar="N", help="of halving, with the last; default: 3")
    group.add_argument("--keep", type=float, metavar="SHARE", help="that goes on from a rung; default: 0.5")


def run_sweep(options: argparse.Namespace) -> int:
    """Check everything, train what is left to train, and print what came out."""
    from lockstep.cli.search.outcome import read_outcome
    from lockstep.cli.search.request import find_earlier, find_folder, open_folder, read_request
    from lockstep.cli.search.swept_run import make_runs

    if options.picture:
        check_new_file(options.picture, "--picture")
    if options.jobs != "auto" and (not options.jobs.isdecimal() or options.jobs == "0"):
        raise BadInput(f"--jobs {options.jobs} must be a whole number from 1, or auto")
    folder = find_folder(options)
    sweep = find_earlier(folder, read_request(options))
    runs = make_runs(sweep, options, folder)
    held = open_folder(folder, sweep)
    try:
        failed = _train(sweep, runs, folder, options)
    finally:
        held.close()
    found = [read_outcome(each, failed.get(each.name, "")) for each in runs]
    _report(found, sweep, folder, options)
    return int(bool(failed))


def _train(sweep: Sweep, runs: list[SweptRun], folder: Path, options: argparse.Namespace) -> dict[str, str]:
    """Train to the end of each rung; gives the last words of runs that failed."""
    from lockstep.cli.search.pool_view import PoolView
    from lockstep.cli.search.run_pool import RunPool, count_jobs
    from lockstep.train.interrupt import Interrupt

    done, jobs = sum(each.is_finished for each in runs), count_jobs(options, runs)
    with PoolView(sys.stderr, len(runs), done) as view, Interrupt() as interrupt:
        there = f", {done} finished already" if done else ""
        view.tell(f"{len(runs)} runs in {folder}{there}; {jobs} at once")
        if sweep.rungs:
            view.tell(
                f"compared after {' and '.join(map(str, runs[0].rungs[:-1]))} of {runs[0].rungs[-1]} epochs"
            )
        pool = RunPool(jobs, options, view, interrupt)
        _climb(pool, view, sweep, runs)
        if interrupt.signal:
            done = sum(each.is_finished for each in runs)
            raise Interrupted(
                f"stopped by {interrupt.signal.name}: {done} of {len(runs)} runs are finished, the others "
                "that had begun are saved: the same command goes on",
                interrupt.signal,
            )
    return pool.failed


def _climb(pool: RunPool, view: PoolView, sweep: Sweep, runs: Sequence[SweptRun]) -> None:
    """Rung by rung: who is among the best by validation accuracy goes on."""
    from lockstep.cli.search.outcome import mean_accuracy, mean_loss, read_outcome
    from lockstep.spec.search.halving import keep_best

    for rung in range(len(runs[0].rungs)):
        if rung:
            scores, losses = dict[str, float | None](), dict[str, float]()
            for name, before in {each.combination: each.rungs[rung - 1] for each in runs}.items():
                found = [read_outcome(each) for each in runs if each.combination == name]
                scores[name], losses[name] = mean_accuracy(found, before), mean_loss(found, before)
            best = keep_best(scores, sweep.keep, losses)
            view.tell(f"{len(best)} of {len(scores)} go on: {', '.join(best)}")
            runs = [each for each in runs if each.combination in best]
        pool.train([each for each in runs if not _is_through(each, rung)], rung)
        if pool.is_stopped or not runs:
            return


def _is_through(swept: SweptRun, rung: int) -> bool:
    from lockstep.cli.search.outcome import read_outcome

    last = rung == len(swept.rungs) - 1
    return swept.is_finished or (not last and read_outcome(swept).epochs >= swept.rungs[rung])


def _report(found: list[Outcome], sweep: Sweep, folder: Path, options: argparse.Namespace) -> None:
    from lockstep.cli.search.sweep_table import sort_outcomes, sweep_records, tell_outcomes

    if options.json:
        print(json.dumps([asdict(each) for each in sweep_records(found, sweep, folder.name)], indent=1))
    else:
        print("\n".join(tell_outcomes(found, sweep)))
    shown = [each for each in sort_outcomes(found) if each.evaluations]
    if options.picture and shown:
        from lockstep.cli.search.sweep_table import draw_outcomes

        draw_outcomes(options.picture, shown, sweep, folder.name)
        print(f"lockstep sweep: drew {options.picture}", file=sys.stderr)
