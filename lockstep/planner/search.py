"""Every plan that comes out for a run and a number of workers, with what it costs, the best first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from lockstep.errors import SpecError
from lockstep.planner.compress.codec_time import find_codec
from lockstep.planner.cost import StepCost, predict
from lockstep.planner.deal_work import Dealer, make_table
from lockstep.planner.layer_seconds import LayerTable, is_measured
from lockstep.planner.memory import WorkerMemory, worker_memory
from lockstep.spec.cluster import Cluster
from lockstep.spec.plan import SHARDS, Plan
from lockstep.spec.plan_check import check_layers, check_slices
from lockstep.spec.profile import Profile
from lockstep.spec.rule.compression import read_compression
from lockstep.spec.run import Run

GOALS = ("time", "cost", "memory")
AXES = (
    "batch",
    "lanes",
    "wire",
    "compress",
    "grid",
)  # of the run, not of the plan: each value is another run
OFFERED = ("bf16", "int8", "top:0.01", "rank:4")  # ways to compress that are tried
_MOST = {"pipeline": 16, "spatial": 16, "channel": 8}
_ROOM = 0.9  # of a worker's memory that a run may take
_MEASURED, _ROUGH, _COUNTED = (
    0.2,
    0.6,
    1.2,
)  # how wrong one may be: docs/planning.md


@dataclass(frozen=True)
class RankedPlan:
    """A plan, the run that it is for, and what a step of it costs."""

    run: Run
    plan: Plan
    cost: StepCost
    memory: WorkerMemory
    fits: bool
    error: float  # the range is the total divided and multiplied by 1 + error
    change: str = ""  # of the run that was asked for, as words of a command

    @property
    def workers(self) -> int:
        return self.plan.data * self.plan.least


def find_plans(
    run: Run, profile: Profile, cluster: Cluster, workers: int, goal: str = "time"
) -> list[RankedPlan]:
    """All plans for so many workers, ranked; those that do not fit the memory come last."""
    cluster.nodes(workers)  # an error without a network
    found, table = [], make_table(run, profile, cluster)
    for plan in list_plans(with_kernels(run, profile, cluster), workers):
        with suppress(SpecError):
            found.append(_judge(run, table, plan))
    if not found:
        raise SpecError(
            f"no plan comes out for {workers} workers: a run has at most as many along `data` as lanes "
            f"(train.lanes={run.train.lanes}): give fewer workers, or -o train.lanes={_power(workers)} with "
            "a batch that divides by it, which is another run"
        )
    return sorted(found, key=lambda one: (not one.fits, *_key(one, cluster, goal), str(one.plan)))


def find_changed(
    run: Run, profile: Profile, cluster: Cluster, workers: int, goal: str, axes: Sequence[str]
) -> list[RankedPlan]:
    """The same for the run and for those that differ from it along some axes, by time or cost an image."""
    found = list[RankedPlan]()
    for change, other in change_run(run, axes).items():
        if 0 < profile.train_images < other.train.batch:
            continue  # an epoch would have no step
        with suppress(SpecError):
            plans = find_plans(other, profile, cluster, workers, goal)
            needs_grid = "bands" in change  # a grid costs time, and pays only where a plan cuts along it
            found += [
                replace(one, change=change)
                for one in plans
                if not needs_grid or one.plan.splits_layers or one.plan.layers
            ]
    if not found:
        return find_plans(run, profile, cluster, workers, goal)  # its error says what to do
    return sorted(found, key=lambda one: (not one.fits, *_key(one, cluster, goal), one.change, str(one.plan)))


def change_run(run: Run, axes: Sequence[str]) -> dict[str, Run]:
    """The run, and all combinations of other values along the axes, by the words that make them."""
    train = run.train
    values: dict[str, list[dict[str, Any]]] = {
        "batch": [{"batch": size} for size in (train.batch // 2, 2 * train.batch, 4 * train.batch)],
        "lanes": [{"lanes": count} for count in (train.lanes // 2, 2 * train.lanes, 4 * train.lanes)],
        "wire": [{"wire": "bf16" if train.wire == "fp32" else "fp32"}],
        "compress": [
            {"compress": scheme}
            | ({"compress_after": 0} if scheme == "none" and train.compress_after else {})
            for scheme in ("none", *OFFERED)
            if scheme != train.compress
        ],
        "grid": [{"bands": 4, "slices": 4}] if train.bands == train.slices == 1 else [],
    }
    found = dict[str, Run]()
    for chosen in product(*([{}, *values[axis]] for axis in axes)):
        keys: dict[str, Any] = {key: value for one in chosen for key, value in one.items()}
        with suppress(SpecError):
            words = " ".join(f"-o train.{key}={value}" for key, value in keys.items())
            found[words] = replace(run, train=replace(train, **keys))
    return found


def judge(run: Run, profile: Profile, cluster: Cluster, plan: Plan) -> RankedPlan:
    """What one plan costs."""
    return _judge(run, make_table(run, profile, cluster), plan)


def _judge(run: Run, table: LayerTable, plan: Plan) -> RankedPlan:
    profile, cluster = table.profile, table.cluster
    cost = predict(Dealer(run, table, plan).deal())
    memory = worker_memory(run, profile, plan, cluster.worker.kind == "gpu" and run.kernels.set != "stock")
    sizes = {row.images for row in profile.lanes} if is_measured(profile, cluster) else set()
    is_known = run.train.batch // run.train.lanes in sizes
    is_plain = is_known and not plan.splits_layers and plan.shard != "parameters"
    how = read_compression(run.train.compress)
    is_plain = is_plain and (not how or find_codec(cluster, how)[1])
    error = _MEASURED if is_plain else _ROUGH if sizes else _COUNTED
    fits = memory.total_gb <= _ROOM * cluster.worker.memory_gb
    return RankedPlan(run, plan, cost, memory, fits, error)


def list_plans(run: Run, workers: int) -> Iterator[Plan]:
    """Plans over data, pipeline, channel, spatial and shard, and layers by channel, that the run allows."""
    for pipeline in _divisors(workers, _MOST["pipeline"]):
        for channel in _divisors(workers // pipeline, _MOST["channel"]):
            for spatial in _divisors(workers // pipeline // channel, min(_MOST["spatial"], run.train.bands)):
                data = workers // pipeline // channel // spatial
                if data > run.train.lanes:
                    continue
                for shard in SHARDS if data > 1 else SHARDS[:1]:
                    plan = Plan(data=data, pipeline=pipeline, channel=channel, spatial=spatial, shard=shard)
                    if _allows(run, plan):
                        yield plan
    if 1 < workers <= min(run.train.lanes, run.train.slices):
        plan = Plan(data=workers, layers=("*",))
        if _allows(run, plan):
            yield plan


def with_kernels(run: Run, profile: Profile, cluster: Cluster) -> Run:
    """The run with those that `auto` takes there, which some plans and grids do not go with."""
    if run.kernels.set != "auto" or run.train.local_steps > 1:
        return run
    likely = "compiled" if cluster.worker.kind == "gpu" else "stock"
    kernels = profile.kernels if is_measured(profile, cluster) else likely
    return replace(run, kernels=replace(run.kernels, set=kernels))


def _power(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _allows(run: Run, plan: Plan) -> bool:
    try:
        check_layers(plan, "--plan", run)
        check_slices(plan, plan.data, run)
    except SpecError:
        return False
    return True


def _divisors(number: int, most: int) -> list[int]:
    return [n for n in range(1, min(number, most) + 1) if number % n == 0]


def _key(one: RankedPlan, cluster: Cluster, goal: str) -> tuple[float, ...]:
    if goal == "memory":
        return one.memory.total_gb, one.cost.total_s
    nodes = cluster.nodes(one.workers)
    return (one.cost.total_s / one.cost.images * (nodes if goal == "cost" else 1), one.memory.total_gb)


def best_of_counts(run: Run, profile: Profile, cluster: Cluster, goal: str) -> list[RankedPlan]:
    """The best plan for every power of two of workers, up to what the lanes allow: how a run scales."""
    found, workers = list[RankedPlan](), 1
    most = run.train.lanes if cluster.network else min(run.train.lanes, cluster.node.workers)
    while workers <= most:
        with suppress(SpecError):
            found.append(find_plans(run, profile, cluster, workers, goal)[0])
        workers *= 2
    return found


def variants(run: Run) -> dict[str, Run]:
    """The run with one setting changed, by what was changed: each is another run, with other bits."""
    train = run.train
    found = {
        "a batch twice as large": replace(run, train=replace(train, batch=2 * train.batch)),
        "twice as many lanes": replace(
            run, train=replace(train, batch=2 * train.batch, lanes=2 * train.lanes)
        ),
    }
    if train.wire == "fp32" and train.compress == "none":
        found["bf16 on the wire"] = replace(run, train=replace(train, wire="bf16"))
    return found
