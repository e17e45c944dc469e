"""Says in words what holds a run back, what would help, and how far it can scale."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from lockstep.errors import SpecError
from lockstep.planner.compress.advice import advise_compression
from lockstep.planner.search import RankedPlan, find_plans, judge, variants, with_kernels
from lockstep.spec.cluster import Cluster
from lockstep.spec.plan import Plan
from lockstep.spec.plan_check import check_layers
from lockstep.spec.profile import LayerProfile, Profile
from lockstep.spec.run import Run

_NAMES = {
    "compute_s": "computing",
    "codec_s": "compressing gradients",
    "inside_s": "the exchange of rows and channels within layers",
    "bubble_s": "waiting for other stages",
    "exposed_s": "the exchange of gradients",
    "gather_s": "collecting parameters",
    "update_s": "the optimizer's update",
    "host_s": "the host's part of a step",
    "data_s": "waiting for images",
}
_GAIN = 1.02  # a change that brings less is not named


@dataclass(frozen=True)
class Advice:
    """A change, and how many times as many images a second it brings."""

    what: str
    gain: float


def explain(best: RankedPlan, profile: Profile, cluster: Cluster) -> list[str]:
    """Lines for people about the best plan for a number of workers."""
    parts = sorted(best.cost.parts().items(), key=lambda item: -item[1])
    told = [
        f"{_NAMES[key]} {100 * s / best.cost.total_s:.0f} %"
        for key, s in parts
        if s > 0.01 * best.cost.total_s
    ]
    lines = [f"a step is {', '.join(told)}"]
    if best.run.train.recompute:
        lines.append(
            "memory and seconds are those without train.recompute=true, which needs less memory and takes up "
            "to a third longer: `lockstep train … --dry-run` measures both"
        )
    where = find_turn(best.run, profile, cluster)
    heavy, share = heaviest(profile)
    megabytes = 4e-6 * profile.parameters
    size = f"{megabytes:,.0f} MB of gradients" if megabytes >= 10 else f"{megabytes:.2g} MB of gradients"
    if len(heavy) > 1 and share > 0.5:
        size += f", {100 * share:.0f} % of it in {' and '.join(_short(layer) for layer in heavy)}"
    if where:
        lines.append(f"communication-bound beyond {where} worker{'s' * (where > 1)} with data alone: {size}")
    else:
        lines.append(
            f"with data alone computing takes longer than the exchange, up to a worker a lane: {size}"
        )
    if fewer := _as_fast(best, profile, cluster):
        lines.append(f"{fewer.workers} workers are as fast: {fewer.plan}, {fewer.cost.img_s:,.0f} img/s")
    advice = advise(best, profile, cluster)
    if advice:
        words = [f"{one.what} ({one.gain:.2f} ×)" for one in advice]
        lines.append(f"would help, each by itself: {', '.join(words)}; each is another run, with other bits")
    lines += advise_compression(best, profile, cluster)
    limit, most = find_limit(best.run, profile, cluster)
    lines.append(
        f"speedup limit by data alone: {limit:.1f} × with {most} workers of {best.run.train.lanes} lanes"
    )
    return lines


def _as_fast(best: RankedPlan, profile: Profile, cluster: Cluster) -> RankedPlan | None:
    """Half as many workers, if they are not slower."""
    if best.workers == 1:
        return None
    fewer = find_plans(best.run, profile, cluster, best.workers // 2)[0]
    return fewer if fewer.cost.img_s * _GAIN >= best.cost.img_s else None


def find_turn(run: Run, profile: Profile, cluster: Cluster) -> int | None:
    """The last number of workers with data alone whose exchange is shorter than computing; None: all are."""
    before, workers = 1, 2
    while workers <= _most(run, cluster):
        cost = judge(run, profile, cluster, Plan(data=workers)).cost
        if cost.exposed_s > cost.compute_s:
            return before
        before, workers = workers, workers * 2
    return None


def _most(run: Run, cluster: Cluster) -> int:
    return run.train.lanes if cluster.network else min(run.train.lanes, cluster.node.workers)


def find_limit(run: Run, profile: Profile, cluster: Cluster) -> tuple[float, int]:
    """How many times as fast as one worker the best number of workers is, by data alone, and that number."""
    counts = [1 << i for i in range(_most(run, cluster).bit_length())]
    times = {n: judge(run, profile, cluster, Plan(data=n)).cost.total_s for n in counts}
    best = min(times, key=lambda n: times[n])
    return times[1] / times[best], best


def heaviest(profile: Profile) -> tuple[Sequence[LayerProfile], float]:
    """The two layers with the most weights, and their share of all."""
    layers = sorted(profile.layers, key=lambda layer: -layer.parameters)[:2]
    return layers, sum(layer.parameters for layer in layers) / max(profile.parameters, 1)


def advise(best: RankedPlan, profile: Profile, cluster: Cluster) -> list[Advice]:
    """Changes of the run by what they bring at the same number of workers, the best first."""
    base, found = best.cost.img_s, []
    for what, run in variants(best.run).items():
        with suppress(SpecError):
            other = find_plans(run, profile, cluster, best.workers)[0]
            found.append(Advice(what, other.cost.img_s / base))
    slices = 1 << (best.workers - 1).bit_length()
    is_plain = best.run.train.compress == "none"
    if is_plain and best.run.train.slices < best.workers <= min(64, best.run.train.lanes):
        with suppress(SpecError):
            run = replace(best.run, train=replace(best.run.train, slices=slices))
            plan = Plan(data=best.workers, layers=("*",))
            check_layers(plan, "--plan", with_kernels(run, profile, cluster))
            other = judge(run, profile, cluster, plan)
            found.append(Advice("fully connected layers by channel", other.cost.img_s / base))
    return sorted((one for one in found if one.gain >= _GAIN), key=lambda one: -one.gain)


def _short(layer: LayerProfile) -> str:
    return layer.name.removeprefix("blocks.")
