"""The tree reduction beside the backend's own all_reduce: same workers, same bytes, interleaved.

The reduction is timed from a list of gradients to the list of their means, copies into and out of buckets
included; all_reduce on one flat tensor. A time is that of the slowest worker.

python benchmarks/reduction.py --workers 4 --rounds 30
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable

import torch
from measure import make_parser, make_record

from lockstep.comm.bucket import ReducedTensor
from lockstep.comm.group import Group
from lockstep.comm.reducer import Reducer
from lockstep.elastic.job import Job
from lockstep.elastic.launcher import Launcher
from lockstep.elastic.worker_groups import WorkerGroups
from lockstep.spec.record import Record, write_records
from lockstep.spec.world import read_world

LIMITS = {1: 1.5, 25: 1.15, 100: 1.15}  # MB → the ratio that is asked for
ENTRY_BYTES = 250_000


def main() -> None:
    parser = make_parser(__doc__, "reduction-cpu.json")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--lanes", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    world = read_world(os.environ)
    if world is None:
        raise SystemExit(
            Launcher(
                Job(options.workers, options.workers, is_elastic=False),
                lambda worker, line: print(f"[{worker}] {line}", file=sys.stderr),
            ).run()
        )
    torch.set_num_threads(1)
    group = WorkerGroups(world, "gloo", torch.device("cpu")).next()
    records = []
    for group.on_one_host in (True, False):  # through shared memory, and as between hosts
        records += [compare(group, options.lanes, size, options.rounds) for size in LIMITS]
    if not group.rank:
        for record in records:
            print(f"{record.name}: {record.value:.3f} {record.spread} {record.details}")
        write_records(options.output, records)
    group.close()


def compare(group: Group, lanes: int, megabytes: int, rounds: int) -> Record:
    """The ratio of times, as the ratio of their medians over interleaved rounds."""
    count = megabytes * 1_000_000 // ENTRY_BYTES
    grads = [torch.randn(ENTRY_BYTES // 4) for _ in range(count)]
    flat = torch.zeros(count * ENTRY_BYTES // 4)
    reducer = Reducer(group, lanes, [ReducedTensor(grad) for grad in grads])

    def tree() -> None:
        reducer.begin()
        own = lanes // group.size
        reducer.add(grads, own.bit_length() - 1)  # the worker's own lanes are summed already
        reducer.finish()

    times: dict[str, list[float]] = {"all_reduce": [], "tree": []}
    for number in range(rounds + 3):
        for name, work in (("all_reduce", lambda: group.all_reduce(flat)), ("tree", tree)):
            seconds = slowest(group, work)
            if number >= 3:
                times[name].append(seconds)
    reducer.close()
    ratio = statistics.median(times["tree"]) / statistics.median(times["all_reduce"])
    rounds_apart = [a / b for a, b in zip(times["tree"], times["all_reduce"], strict=True)]
    medians = {f"{name} ms": round(1e3 * statistics.median(values), 2) for name, values in times.items()}
    way = "shared memory" if group.on_one_host else "sockets"
    name = f"tree reduction by {way} over all_reduce, {megabytes} MB, {group.size} workers, gloo"
    record = make_record(name, rounds_apart, "x", ratio_of_medians=ratio, limit=LIMITS[megabytes], **medians)
    return record


def slowest(group: Group, work: Callable[[], object]) -> float:
    """The time that the slowest worker takes."""
    group.barrier()
    start = time.perf_counter()
    work()
    mine = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    every = torch.zeros(group.size, dtype=torch.float64)
    group.all_gather(every, mine)
    return float(every.max())


if __name__ == "__main__":
    main()
