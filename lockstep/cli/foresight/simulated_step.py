"""A recipe's step, simulated for `lockstep simulate`: its seconds, and a trace of it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.cli.flag import add_run_keys
from lockstep.cli.foresight.profile import check_new
from lockstep.cli.train import named_file, resolve_steps
from lockstep.errors import BadInput
from lockstep.spec import Launch
from lockstep.spec.plan import read_plan

if TYPE_CHECKING:
    from lockstep.spec.cluster import Cluster

_PLAN = "pipeline=1"


def add_step(parser: argparse.ArgumentParser) -> None:
    """Add the flags that make a step: its seconds, or a recipe and a plan."""
    add_run_keys(parser)
    add = parser.add_argument
    add("--step-ms", type=float, metavar="MS", help="of a step with all nodes, instead of a recipe")
    add("--plan", default=_PLAN, metavar="SPEC|FILE", help="of the recipe's workers; default: data")
    add(
        "--profile", type=Path, metavar="FILE.json", help="of `lockstep profile`; default: layers are counted"
    )
    add("--classes", type=int, default=0, metavar="N", help="of images that are not here")
    add("--images", type=int, default=0, metavar="N", help="how many of them there are to train on")
    add("--spread", type=float, default=0.0, metavar="SHARE",
        help="of a worker's computing from step to step: 0.1 is about 10 %%; default: 0")  # fmt: skip
    add("--steps", type=int, default=100, metavar="N", help="of the recipe that are simulated; default: 100")
    add("--trace", type=Path, metavar="FILE.json", help="the first step of some workers, for Perfetto")


def check_step(options: argparse.Namespace) -> None:
    """Refuse what does not go together."""
    recipe = [key for key in ("recipe", "config", "override", "profile", "trace") if getattr(options, key)]
    recipe += ["spread"] if options.spread else []
    recipe += ["plan"] if options.plan != _PLAN else []
    if options.lanes and options.step_ms is None:
        raise BadInput(f"--lanes {options.lanes} goes with --step-ms: a recipe has -o train.lanes=…")
    if options.step_ms is None and not options.recipe and not options.config:
        raise BadInput("simulate: how long is a step? Give --step-ms, or a recipe whose step is simulated")
    if options.step_ms is not None and recipe:
        raise BadInput(
            f"simulate: --step-ms {options.step_ms:g} is instead of a recipe, and {recipe[0]} is of one: "
            "leave one of them out"
        )
    check_new(options.trace)


def simulate_recipe(options: argparse.Namespace, cluster: Cluster) -> dict[str, Any]:
    """Steps of the recipe on all workers of the nodes: what came out, beside the closed form."""
    from lockstep.cli.foresight.counted_profile import find_profile
    from lockstep.planner.cost import predict
    from lockstep.planner.deal_work import deal_work
    from lockstep.planner.simulation.event_trace import to_chrome
    from lockstep.planner.simulation.step_events import simulate_step

    run = resolve_steps(options, Launch())
    if run.train.local_steps > 1:
        raise BadInput(
            f"simulate: train.local_steps={run.train.local_steps}: steps are simulated one by one, each with "
            "an exchange: use `lockstep plan`, or train.local_steps=1"
        )
    plan = read_plan(options.plan).for_workers(options.nodes * cluster.node.workers)
    if plan.data > run.train.lanes:
        raise BadInput(
            f"--plan {plan} has {plan.data} workers along data for train.lanes={run.train.lanes}: each needs "
            f"a lane; give -o train.lanes={1 << (plan.data - 1).bit_length()}"
        )
    with named_file(options):
        work = deal_work(run, find_profile(options, run, cluster.worker.device), cluster, plan)
    done, cost = simulate_step(work, options.seed, options.spread, options.steps), predict(work)
    if options.trace:
        options.trace.write_text(json.dumps(to_chrome(done.events)), encoding="utf-8")
    return {
        "plan": str(plan),
        "workers": work.workers,
        "lanes": run.train.lanes * plan.least,  # as if each worker had its own
        "step_s": done.mean_s,
        "range_s": [min(done.seconds), max(done.seconds)],
        "steps": options.steps,
        "closed_form_s": cost.total_s,
        "img_s": work.images / done.mean_s,
    }


def tell_step(step: dict[str, Any], spread: float) -> str:
    """A line about it."""
    low, high = (f"{1e3 * seconds:.4g}" for seconds in step["range_s"])
    return (
        f"{step['plan']}, {step['workers']:,} workers: {1e3 * step['step_s']:.4g} ms a step ({low} to {high} "
        f"in {step['steps']} with a spread of {spread:g}; {1e3 * step['closed_form_s']:.4g} in closed form), "
        f"{step['img_s']:,.0f} img/s"
    )
