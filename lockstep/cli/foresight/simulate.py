"""`lockstep simulate`: how much of a long run's time is useful when nodes fail."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.cli.flag import add_json, check_new_file
from lockstep.cli.foresight.simulated_step import add_step, check_step, simulate_recipe, tell_step
from lockstep.errors import BadInput

if TYPE_CHECKING:
    from lockstep.planner.simulation.failures import FailingRun, Goodput
    from lockstep.spec.cluster import Cluster

    Verbs = argparse._SubParsersAction[argparse.ArgumentParser]

_TEXT = """\
Simulate a run on many nodes: its steps, with workers that are slower now and then, and weeks of them in which
nodes fail. It shows goodput: the time of the useful steps over the time that the run took.

  lockstep simulate --cluster 8xH100 --nodes 1000 --step-ms 250 --node-mtbf-hours 10000,40000
  lockstep simulate --cluster 8xH100 --nodes 1000 --step-ms 250 --recover-s 60 --picture goodput.png
  lockstep simulate imagenet --cluster 8xH100 --nodes 128 -o train.lanes=1024 -o train.batch=32768 \\
    --spread 0.05 --trace step.json

Two ways meet the same failures. `restart` stops, loses what is after the last checkpoint and starts all
workers again, on a spare node that is always at hand. `lockstep` redoes the step and goes on with the nodes
that are left; a lost one is replaced after --repair-hours. Both write checkpoints at the same interval, which
each row of the table has. Below it are the best interval for restarts that was found, and that of Young and
Daly, sqrt(2 × checkpoint × time between failures of the run).

Nothing is measured or started here, and the same seed gives the same numbers. The defaults of --detect-s,
--recover-s and --restart-s are medians that were measured for 4 workers of one machine; on large clusters all
of them are longer: give yours.
"""
_MINUTES = "2,5,10,20,30,60,120,240"


def add_parser(verbs: Verbs) -> None:
    """Add the verb and its flags."""
    parser = verbs.add_parser(
        "simulate",
        help="simulate a long run whose nodes fail",
        description=_TEXT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add_step(parser)
    add(
        "--cluster",
        required=True,
        metavar="NAME|FILE",
        help="a preset, a file by `probe`, or here",
    )
    add("--nodes", required=True, type=int, metavar="N", help="of the run, 2 or more")
    add("--lanes", type=int, default=0, metavar="V",
        help="train.lanes, with --step-ms; default: as few as give each worker one")  # fmt: skip
    add("--node-mtbf-hours", type=_numbers, default=[40000.0], metavar="H,H,…",
        help="mean hours of a node between failures; default: 40000")  # fmt: skip
    add("--checkpoint-s", type=float, default=30.0, metavar="S",
        help="that training stands still for a checkpoint; default: 30")  # fmt: skip
    add("--interval-min", type=_numbers, default=_numbers(_MINUTES), metavar="M,M,…",
        help=f"minutes of training between checkpoints; default: {_MINUTES}")  # fmt: skip
    add(
        "--restart-s",
        type=float,
        metavar="S",
        help="a failure to the first step after a restart; default: 14.2",
    )
    add("--detect-s", type=float, metavar="S", help="until a lost node is noticed; default: 1.28")
    add("--recover-s", type=float, metavar="S", help="from there to the redone step; default: 0.18")
    add("--repair-hours", type=float, default=4.0, metavar="H", help="until a node is replaced; default: 4")
    add("--survive", type=float, default=1.0, metavar="SHARE",
        help="share of losses after which some worker has the lost state; default: 1, for plans in which "
        "several nodes have the same")  # fmt: skip
    add("--days", type=float, default=30.0, metavar="D", help="length of a run; default: 30")
    add("--runs", type=int, default=10, metavar="N", help="how many are simulated; default: 10")
    add("--seed", type=int, default=0, metavar="N", help="of the failures; default: 0")
    add("--picture", type=Path, metavar="FILE.png", help="draw goodput by interval; must not exist yet")
    add_json(parser)
    parser.set_defaults(handler=show_goodput)


def _numbers(text: str) -> list[float]:
    try:
        return [float(word) for word in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' must be numbers with commas between them") from None


def show_goodput(options: argparse.Namespace) -> int:
    """Print the table, and draw it."""
    from lockstep.planner.preset import find_cluster
    from lockstep.planner.simulation.failures import expect_goodput, find_interval, simulate_run

    check_step(options)
    if options.picture:
        check_new_file(options.picture, "--picture")
    cluster = find_cluster(options.cluster)
    _make_runs(options, cluster, options.step_ms or 1.0, options.lanes)  # refuses bad numbers
    step = simulate_recipe(options, cluster) if options.step_ms is None else {}
    step_ms, lanes = (1e3 * step["step_s"], step["lanes"]) if step else (options.step_ms, options.lanes)
    found: list[tuple[FailingRun, list[Goodput], Goodput]] = []
    for run in _make_runs(options, cluster, step_ms, lanes):
        rows = simulate_run(
            run, [60 * minutes for minutes in options.interval_min], options.seed, options.runs
        )
        found.append((run, rows, find_interval(run, options.seed, options.runs)))
    title = (
        f"{run.nodes:,} nodes of {cluster.name}, steps of {step_ms:.4g} ms; {run.checkpoint_s:g} s a "
        f"checkpoint, {run.restart_s:g} s a restart, {run.detect_s + run.recover_s:.3g} s a recovery"
    )
    if options.json:
        print(json.dumps({"step": step, "rates": [_as_table(*one) for one in found]}, indent=1))
    else:
        print(f"{tell_step(step, options.spread)}\n{title}" if step else title)
        for one, rows, best in found:
            _print_rate(one, rows, best, expect_goodput(one, best.interval_s))
        if (slow := run.slowdown(run.nodes - 1)) > 1:
            print(
                f"\nwithout a node some worker has a lane more: steps take {slow:.3g} × until it is replaced"
            )
    if options.picture:
        _draw(options.picture, title, found)
    return 0


def _make_runs(options: argparse.Namespace, cluster: Cluster, step_ms: float, lanes: int) -> list[FailingRun]:
    """The run with each rate of failures."""
    from lockstep.planner.simulation.failures import FailingRun

    given = {key: getattr(options, key) for key in ("restart_s", "detect_s", "recover_s")}
    runs = [
        FailingRun(
            step_s=step_ms / 1e3,
            nodes=options.nodes,
            node_mtbf_hours=hours,
            checkpoint_s=options.checkpoint_s,
            workers_a_node=cluster.node.workers,
            lanes=lanes,
            repair_s=3600 * options.repair_hours,
            survive=options.survive,
            days=options.days,
            **{key: value for key, value in given.items() if value is not None},
        )
        for hours in options.node_mtbf_hours
    ]
    cluster.nodes(options.nodes * cluster.node.workers)
    if min(options.interval_min) <= 0:
        raise BadInput(f"--interval-min {min(options.interval_min):g} must be above 0")
    return runs


def _as_table(run: FailingRun, rows: list[Goodput], best: Goodput) -> dict[str, Any]:
    return {
        "run": asdict(run),
        "young_s": run.young_s,
        "best_restart_interval_s": best.interval_s,
        "goodput": [{"restart": row.restart, "recovery": row.recovery, **asdict(row)} for row in rows],
    }


def _print_rate(run: FailingRun, rows: list[Goodput], best: Goodput, expected: float) -> None:
    print(
        f"\na node fails every {run.node_mtbf_hours:,g} hours, the run meets a failure every "
        f"{_duration(run.mtbf_s)}\n"
        "checkpoint every  restart  lowest…highest  lockstep  lowest…highest"
    )
    for row in rows:
        print(
            f"{_duration(row.interval_s):>16}  {_percent(row.restart):>7}  {_range(row.restart_runs):>14}  "
            f"{_percent(row.recovery):>8}  {_range(row.recovery_runs):>14}"
        )
    print(
        f"best interval for restarts: {_duration(best.interval_s)} ({_percent(best.restart)}; in closed form "
        f"{_percent(expected)}); by Young and Daly {_duration(run.young_s)}"
    )


def _duration(seconds: float) -> str:
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def _range(runs: tuple[float, ...]) -> str:
    return f"{100 * min(runs):.2f}…{100 * max(runs):.2f}"


def _draw(path: Path, title: str, found: list[tuple[FailingRun, list[Goodput], Goodput]]) -> None:
    from lockstep.report.goodput_picture import GoodputCurve, draw_goodput

    curves = [
        GoodputCurve(
            f"a failure every {_duration(run.mtbf_s)}",
            [row.interval_s for row in rows],
            [row.restart for row in rows],
            [row.recovery for row in rows],
            run.young_s,
        )
        for run, rows, _ in found
    ]
    draw_goodput(path, title, curves)
