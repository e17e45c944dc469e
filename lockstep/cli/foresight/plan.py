"""`lockstep plan`: which way to spread a run over a cluster is fastest, how fast, and what holds it back."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.cli.flag import add_run_keys
from lockstep.cli.foresight.profile import check_new
from lockstep.cli.train import named_file, resolve_steps
from lockstep.errors import BadInput, unknown
from lockstep.spec import Launch, Run
from lockstep.spec.prediction import OF

if TYPE_CHECKING:
    from lockstep.planner.search import RankedPlan
    from lockstep.spec.cluster import Cluster
    from lockstep.spec.profile import Profile

    Verbs = argparse._SubParsersAction[argparse.ArgumentParser]

_TEXT = """\
Predict how long a step of a run takes on a cluster under every plan that comes out, best first, and why:

  lockstep plan cifar10 --cluster 8xH100 --workers 8
  lockstep plan imagenet --cluster 8xA100 --workers 256 -o train.lanes=256 -o train.batch=16384
  lockstep probe --output here.toml; lockstep profile cifar10 --output p.json
  lockstep plan cifar10 --cluster here.toml --profile p.json --workers 2 --output plan.toml
  lockstep train cifar10 --plan plan.toml
  lockstep plan cifar10 --cluster 8xH100 --workers 8 --vary batch,compress  other runs, with other bits

Without --profile the layers are counted, and their times follow from the cluster's rates; that is rougher.
Nothing is started and no GPU is needed. The same input gives the same output.
"""


def add_parser(verbs: Verbs) -> None:
    """Add the verb and its flags."""
    parser = verbs.add_parser(
        "plan",
        help="predict how fast a run will be on a cluster, and what holds it back",
        description=_TEXT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_run_keys(parser)
    parser.add_argument(
        "--cluster",
        required=True,
        metavar="NAME|FILE",
        help="a preset, a file by `probe`, or here",
    )
    parser.add_argument("--workers", type=int, metavar="N", help="default: the best for 1, 2, 4 … workers")
    parser.add_argument("--goal", default="time", help="time, cost or memory; default: time")
    parser.add_argument(
        "--vary",
        default="",
        metavar="AXES",
        help="of batch, lanes, wire, compress, grid: rank runs with these changed too, which have other bits",
    )
    parser.add_argument("--profile", type=Path, metavar="FILE.json", help="what `lockstep profile` measured")
    parser.add_argument("--classes", type=int, default=0, help="of images that are not here")
    parser.add_argument("--images", type=int, default=0, help="how many there are to train on")
    parser.add_argument("--top", type=int, default=8, help="how many plans are shown; default: 8")
    parser.add_argument(
        "--output", type=Path, metavar="PLAN.toml", help="write the best plan for `train --plan`"
    )
    parser.add_argument("--json", action="store_true", help="print all of it as JSON")
    parser.set_defaults(handler=show_plans)


def show_plans(options: argparse.Namespace) -> int:
    """Predict, rank, explain."""
    from lockstep.cli.foresight.counted_profile import find_profile
    from lockstep.planner.explain import explain
    from lockstep.planner.preset import find_cluster
    from lockstep.planner.search import AXES, GOALS, best_of_counts, find_changed, find_plans

    run = resolve_steps(options, Launch())
    cluster = find_cluster(options.cluster)
    if options.goal not in GOALS:
        raise BadInput(f"--goal {options.goal} must be {', '.join(GOALS[:-1])} or {GOALS[-1]}")
    for key, least in (("workers", 1), ("top", 1), ("classes", 0), ("images", 0)):
        if (value := getattr(options, key)) is not None and value < least:
            raise BadInput(f"--{key} {value} must be at least {least}")
    axes = [axis.strip() for axis in options.vary.split(",") if axis.strip()]
    for axis in axes:
        if axis not in AXES:
            raise BadInput(f"--vary {options.vary}: {unknown('axis', axis, AXES)}")
    if axes and not options.workers:
        raise BadInput(f"--vary {options.vary} needs --workers N: compare runs for one number of workers")
    check_new(options.output)
    with named_file(options):
        profile = find_profile(options, run, cluster.worker.device)
        if 0 < profile.train_images < run.train.batch:
            raise BadInput(
                f"train.batch={run.train.batch} is more than the {profile.train_images} images to train on: "
                "an epoch has no step"
            )
        if options.workers:
            found = find_changed(run, profile, cluster, options.workers, options.goal, axes)
        else:
            found = best_of_counts(run, profile, cluster, options.goal)
    for line in _warn(options, run, profile, cluster):
        print(f"lockstep: {line}", file=sys.stderr)
    alone = {  # by one worker: what speedup is against
        change: find_plans(changed, profile, cluster, 1)[0].cost.img_s
        for change, changed in {each.change: each.run for each in found}.items()
    }
    best = found[0] if options.workers else min(found, key=lambda each: each.cost.total_s)
    if options.json:
        rows = [_row(each, alone, profile, cluster) for each in found]
        chosen = {"plan": str(best.plan), "workers": best.workers, "change": best.change}
        facts = {"plans": rows, "best": chosen, "why": explain(best, profile, cluster)}
        print(json.dumps({**_about(run, cluster), **facts}, indent=1))
    else:
        _print_table(found[: options.top], alone, profile, cluster)
        print(f"\n{best.plan} {best.change}".rstrip() + ": " + "\n".join(explain(best, profile, cluster)))
        print(_tell_error(best))
    if options.output:
        options.output.write_text(_plan_file(best), encoding="utf-8")
        change = f" {best.change}" if best.change else ""
        print(f"wrote {options.output}: lockstep train … --plan {options.output}{change}", file=sys.stderr)
    return 0


def _warn(options: argparse.Namespace, run: Run, profile: Profile, cluster: Cluster) -> Iterator[str]:
    """What makes these predictions other than one might expect."""
    from lockstep.planner.compress.advice import doubt_compression
    from lockstep.planner.layer_seconds import is_measured, known_rate

    yield from doubt_compression(run, cluster)
    precision, rates = run.train.precision, cluster.worker.gflop_s
    if options.profile and not is_measured(profile, cluster):
        yield (
            f"{options.profile} is of {profile.device or 'no device'}, and {cluster.name} has "
            f"{cluster.worker.device}: layers are only counted, so this is rougher"
        )
    kind = known_rate(cluster, precision)
    if kind != precision:
        yield f"{cluster.name} has no rate for {precision}: that of {kind} is taken"
    if rates[kind] < 0.5 * rates["fp32"]:
        yield f"{cluster.name} is slow in {kind}: consider -o train.precision=fp32, which is another run"
    if options.goal == "cost" and not cluster.node.price_hour:
        yield f"{cluster.name} has no price: nodes count; give node.price_hour in a file of it"


def _about(run: Run, cluster: Cluster) -> dict[str, object]:
    """The run and the links that plans are for."""
    train, link, network = run.train, cluster.node.link, cluster.network
    return {
        "cluster": cluster.name,
        "device": cluster.worker.device,
        "workers_a_node": cluster.node.workers,
        "link": asdict(link) if link else None,
        "network": asdict(network) if network else None,
        "model": run.model.name,
        "batch": train.batch,
        "lanes": train.lanes,
        "precision": train.precision,
        "wire": train.wire,
        "compress": train.compress,
    }


def _row(each: RankedPlan, alone: dict[str, float], profile: Profile, cluster: Cluster) -> dict[str, object]:
    speedup = each.cost.img_s / alone[each.change]
    hours = train_hours(each, profile)
    nodes = cluster.nodes(each.workers)
    return {
        "plan": str(each.plan),
        "workers": each.workers,
        **asdict(each.cost),
        "img_s": each.cost.img_s,
        "exchange_s": each.cost.exchange_s,
        "range_s": [each.cost.total_s / (1 + each.error), each.cost.total_s * (1 + each.error)],
        "change": each.change,
        "speedup": speedup,
        "efficiency": speedup / each.workers,
        "memory_gb": each.memory.total_gb,
        "fits": each.fits,
        "hours": hours,
        "price": hours * nodes * cluster.node.price_hour,
    }


def train_hours(each: RankedPlan, profile: Profile) -> float:
    """Hours of all steps of the run; evaluation is not in it."""
    steps = profile.train_images // each.run.train.batch * each.run.train.epochs
    return steps * each.cost.total_s / 3600


def _print_table(
    found: list[RankedPlan], alone: dict[str, float], profile: Profile, cluster: Cluster
) -> None:
    priced = cluster.node.price_hour > 0
    rows = [
        ("plan", "workers", "step ms", "img/s", "speedup", "of ideal", "exchange", "bubble", "GB", "hours")
    ]
    rows = [(*rows[0], "price")] if priced else rows  # type: ignore[list-item]
    for each in found:
        cost, row = each.cost, _row(each, alone, profile, cluster)
        sent = cost.exposed_s + cost.inside_s + cost.gather_s
        cells = (
            f"{each.plan} {each.change}".rstrip(),
            str(each.workers),
            f"{1e3 * cost.total_s:.4g}",
            f"{cost.img_s:,.0f}",
            f"{row['speedup']:.2f} ×",
            f"{100 * float(str(row['efficiency'])):.0f} %",
            f"{100 * sent / cost.total_s:.0f} %",
            f"{100 * cost.bubble_s / cost.total_s:.0f} %",
            f"{each.memory.total_gb:.2g}" + ("" if each.fits else " too much"),
            f"{row['hours']:.3g}",
        )
        rows.append((*cells, f"{row['price']:,.0f}") if priced else cells)  # type: ignore[arg-type]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for cells in rows:
        words = [
            t.ljust(w) if i == 0 else t.rjust(w) for i, (t, w) in enumerate(zip(cells, widths, strict=True))
        ]
        print("  ".join(words).rstrip())


def _tell_error(best: RankedPlan) -> str:
    low, high = best.cost.total_s / (1 + best.error), best.cost.total_s * (1 + best.error)
    return (
        f"range of a step: {1e3 * low:.4g} to {1e3 * high:.4g} ms (how wrong it was so far: docs/planning.md)"
    )


def _plan_file(best: RankedPlan) -> str:
    """The plan as `train --plan` reads it."""
    words = [word.partition("=") for word in str(best.plan).split(",")]
    lines = [f"{key} = {value if value.isdecimal() else json.dumps(value)}" for key, _, value in words]
    if best.plan.layers:
        lines = [line for line in lines if not line.startswith("layers")]
        lines += [f"layers = {json.dumps(list(best.plan.layers))}"]
    parts = {**{key: getattr(best.run.train, key) for key in OF}, **best.cost.segments()}
    lines += ["", "[predicted]  # seconds; a run by this plan tells in its summary.json how wrong they were"]
    return "\n".join([*lines, *(f"{key} = {_write(value)}" for key, value in parts.items())]) + "\n"


def _write(value: float | str) -> str:
    return json.dumps(value) if isinstance(value, str) else f"{value:.6g}"
