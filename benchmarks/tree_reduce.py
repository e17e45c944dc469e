"""The tree all-reduce alone beside the backend's own all_reduce, 1 KB to 100 MB, interleaved.

The tree is timed from each worker's filled buffer to the means, through shared memory and through sockets;
all_reduce on one flat tensor of the same length. A time is that of the slowest worker. `reduction.py` times
the whole way from a list of gradients to the list of their means.

With --gpu, what one GPU can show: the tree over 8 lanes on it beside torch's mean, and two workers that share
it, whose tree and whose all_reduce both go through host memory by gloo.

python benchmarks/tree_reduce.py --workers 4 --rounds 15
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from measure import RESULTS, make_parser, make_record
from reduction import slowest

from lockstep.comm.exchange import ExchangeShape, make_exchange
from lockstep.comm.group import Group
from lockstep.comm.transport import TorchTransport
from lockstep.comm.tree import LaneTree, subtrees, worker_lanes
from lockstep.comm.tree_reduce import TreeReduce
from lockstep.elastic.job import Job
from lockstep.elastic.launcher import Launcher
from lockstep.elastic.worker_groups import WorkerGroups
from lockstep.spec.record import Record, write_records
from lockstep.spec.world import read_world

SIZES = {"1 KB": 1e3, "16 KB": 16e3, "256 KB": 256e3, "4 MB": 4e6, "25 MB": 25e6, "100 MB": 100e6}
LANES, WARM_UP = 8, 3
Ways = dict[str, Callable[[], object]]  # the first is what the others are compared with


def main() -> None:
    parser = make_parser(__doc__, None)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--gpu", action="store_true")
    options = parser.parse_args()
    if options.gpu:
        output = options.output or RESULTS / "tree-reduce-gpu.json"
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(on_one_gpu, (f"{folder}/store", options.rounds, output), nprocs=2)
        return
    world = read_world(os.environ)
    if world is None:
        job = Job(options.workers, options.workers, is_elastic=False)
        raise SystemExit(
            Launcher(job, lambda worker, line: print(f"[{worker}] {line}", file=sys.stderr)).run()
        )
    torch.set_num_threads(1)
    group = WorkerGroups(world, "gloo", torch.device("cpu")).next()
    records = [found for size in SIZES for found in compare_exchanges(group, size, options.rounds)]
    if not group.rank:
        write(options.output or RESULTS / f"tree-reduce-cpu-{group.size}.json", records)
    group.close()


def compare_exchanges(group: Group, size: str, rounds: int) -> list[Record]:
    """Shared memory and sockets over all_reduce."""
    length = int(SIZES[size]) // 4
    owned = [subtrees(worker_lanes(LANES, group.size, rank)) for rank in range(group.size)]
    heights = [[height for _, height in own] for own in owned]
    shape = ExchangeShape(heights, length, torch.float32, None, torch.device("cpu"))
    flat = torch.zeros(length)
    ways: Ways = {"all_reduce": lambda: group.all_reduce(flat)}
    for group.on_one_host in (True, False):
        ways["shared memory" if group.on_one_host else "sockets"] = make_exchange(group, shape).run
    return compare(ways, rounds, lambda work: slowest(group, work), f"{size}, {group.size} workers, gloo")


def compare(
    ways: Ways, rounds: int, measure: Callable[[Callable[[], object]], float], where: str
) -> list[Record]:
    """The ratio of each way to the first, round by round; the ratio of medians beside it."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + WARM_UP):
        for name, work in ways.items():
            seconds = measure(work)
            times[name] += [seconds] * (number >= WARM_UP)
    base, *others = ways
    return [over(times, name, base, where) for name in others]


def over(times: dict[str, list[float]], name: str, base: str, where: str) -> Record:
    """The record of one way over the other."""
    ratios = [mine / theirs for mine, theirs in zip(times[name], times[base], strict=True)]
    medians = {way: statistics.median(times[way]) for way in (name, base)}
    details = {f"{way} ms": round(1e3 * seconds, 3) for way, seconds in medians.items()}
    title = f"tree all-reduce by {name} over {base}, {where}"
    return make_record(title, ratios, "x", ratio_of_medians=medians[name] / medians[base], **details)


def write(output: Path, records: list[Record]) -> None:
    """Show the records, and keep them."""
    for record in records:
        print(f"{record.name}: {record.value:.3f} {record.spread} {record.details}")
    write_records(output, records)


def on_one_gpu(rank: int, store: str, rounds: int, output: Path) -> None:
    """One of two workers: the first compares the sums of lanes alone, then both reduce through the host."""
    torch.set_num_threads(1)  # as a worker does
    records = [] if rank else [found for size in SIZES for found in compare_sums(size, rounds)]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    group = Group(rank, 2, TorchTransport.of_script(dist.group.WORLD))
    for size, num_bytes in SIZES.items():
        flat = torch.randn(int(num_bytes) // 4, device="cuda")
        tree = TreeReduce(flat, 2)
        ways: Ways = {"all_reduce": partial(dist.all_reduce, flat), "host": partial(tree.all_reduce, [flat])}
        where = f"{size}, 2 workers on one GPU, gloo"
        records += compare(ways, rounds, lambda work: slowest(group, lambda: wait_for(work)), where)
    if not rank:
        write(output, records)
    dist.destroy_process_group()


def compare_sums(size: str, rounds: int) -> list[Record]:
    """The tree over the lanes of one worker over torch's sum; both leave the lanes as they are."""
    lanes = torch.randn(LANES, int(SIZES[size]) // 4, device="cuda")

    def tree() -> None:
        found = LaneTree()
        for lane in lanes.clone():
            found.add([lane])
        found.mean()

    ways: Ways = {"torch.mean": lambda: lanes.mean(0), "one worker": tree}
    return compare(ways, rounds, wait_for, f"{size}, {LANES} lanes on one GPU")


def wait_for(work: Callable[[], object]) -> float:
    """Seconds until the GPU is done."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
