"""Simulated, not measured: goodput of long runs whose nodes fail; and the time to simulate 10,000 workers.

python benchmarks/goodput.py

Rates of failure: one that was published for a run of 54 days on 16,384 H100 (419 unexpected interruptions, so
2048 nodes × 1296 hours / 419), and one that is six times lower. Delays: those of recovery-cpu.json, and
longer ones that are assumptions.
"""

from __future__ import annotations

import time
from dataclasses import replace

from measure import make_parser, make_record

from lockstep.planner.simulation.failures import FailingRun, expect_goodput, find_interval, simulate_run
from lockstep.planner.simulation.step_events import simulate_step
from lockstep.planner.step_work import BucketWork, StageWork, StepWork
from lockstep.spec.cluster import Cluster, LinkRate, NetworkRate, NodeShape, WorkerSpeed
from lockstep.spec.plan import Plan
from lockstep.spec.record import Record, write_records

PUBLISHED_H = 2048 * 54 * 24 / 419
RUN = FailingRun(step_s=0.25, nodes=1000, node_mtbf_hours=40_000, workers_a_node=8)
DELAYS = {"measured": {}, "assumed": {"restart_s": 600.0, "detect_s": 10.0, "recover_s": 50.0}}
INTERVALS_S = [120, 600, 1200, 3600, 14_400]


def main() -> None:
    options = make_parser(__doc__, "simulated-goodput.json").parse_args()
    records = [
        record for delays in DELAYS for hours in (PUBLISHED_H, 40_000.0) for record in sweep(delays, hours)
    ]
    records += [few_lanes(lanes) for lanes in (8192, 65_536)]
    records += [time_steps(plan) for plan in (Plan(data=10_000), Plan(data=1250, pipeline=8))]
    write_records(options.output, records)
    for record in records:
        low, high = record.spread
        print(f"{record.name}: {record.value:.4g} {record.unit} ({low:.4g} to {high:.4g})")


def sweep(delays: str, hours: float) -> list[Record]:
    """Goodput by interval for both ways, and the best interval for restarts."""
    run = replace(RUN, node_mtbf_hours=hours, **DELAYS[delays])
    about = f"{delays} delays, a node fails every {hours:,.0f} hours"
    records = []
    for row in simulate_run(run, INTERVALS_S):
        at = f"{about}, a checkpoint every {row.interval_s / 60:g} min"
        for way, mean, runs in (
            ("restart", row.restart, row.restart_runs),
            ("recovery", row.recovery, row.recovery_runs),
        ):
            records.append(replace(make_record(f"{way}: {at}", runs, "of the time"), value=mean))
    best = find_interval(run)
    closed = expect_goodput(run, best.interval_s)
    more = {"young_s": run.young_s, "goodput": best.restart, "closed_form": closed}
    return [*records, make_record(f"best interval of restarts: {about}", [best.interval_s], "s", **more)]


def few_lanes(lanes: int) -> Record:
    """1024 nodes, which a run of 8192 lanes just fills."""
    run = replace(RUN, nodes=1024, lanes=lanes, node_mtbf_hours=PUBLISHED_H)
    row = simulate_run(run, [3600])[0]
    record = make_record(f"recovery: 8192 workers, {lanes} lanes, an hour", row.recovery_runs, "of the time")
    return replace(record, value=row.recovery)


def time_steps(plan: Plan) -> Record:
    """Seconds of a core that 100 steps of 10,000 workers take to simulate."""
    speed = WorkerSpeed("gpu", "a GPU", 80.0, 3000.0, {"fp32": 6e4})
    cluster = Cluster("8", speed, NodeShape(8, LinkRate(5.0, 300.0)), NetworkRate(8.0, 400.0))
    buckets = tuple(BucketWork(25e6, (place + 1) / 4) for place in range(4))
    stage = StageWork(8, 0.01, 0.02, 0.0, 1e6, buckets, 0.001, 0.0)
    work = StepWork(cluster, plan, (stage,) * plan.pipeline, 0.001, 0.0, 80_000, True)
    seconds = []
    for seed in range(5):
        start = time.process_time()
        simulate_step(work, seed, spread=0.1, steps=100)
        seconds.append(time.process_time() - start)
    return make_record(f"to simulate 100 steps of {plan}, 8 lanes each", seconds, "s")


if __name__ == "__main__":
    main()
