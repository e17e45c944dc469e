"""Steps and exchanges over slow links, compressed and as they are; PyTorch's DDP with its hooks beside them.

python benchmarks/slow_links.py --model alexnet --workers 4

Every worker is in a network namespace of its own, whose link is shaped to one rate after another, has one
lane of few images and one thread. An exchange begins with the gradients of all parameters and ends with their
means, compressing included; what compressing takes without a link is told apart, and so is a step without the
others, timed while all workers do the same. All workers share this machine's cores. Needs root and iproute2.

A shaped rate is reached or not: see the records of the links. With --cluster, what `lockstep probe` wrote of
this machine, `planned_s` is what the planner gives for it with such a network, its cores slowed down until a
step without the others takes as long as was measured.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ddp_peer import HOOKS
from measure import make_parser, make_record
from shaped_link import INTERFACE, ShapedNodes, inside, shaped_nodes
from slow_worker import CLASSES, SHAPE, Task

from lockstep.planner.cost import predict
from lockstep.planner.deal_work import deal_work
from lockstep.spec import Record, Run
from lockstep.spec.cluster import Cluster, NetworkRate, NodeShape
from lockstep.spec.cluster_file import read_cluster
from lockstep.spec.plan import Plan
from lockstep.spec.record import read_records, write_records
from lockstep.train.foresight.own_prediction import count_profile

MODELS = ("alexnet", "googlenet", "resnet18")
SCHEMES = ("none", "bf16", "fp8", "int8", "top:0.01", "rank:4")
RATES = {"10gbit": 10.0, "1gbit": 1.0, "100mbit": 0.1}  # Gb/s
LATENCY_US = 100.0


def main() -> None:
    parser = make_parser(__doc__, "slow-links-cpu.json")
    parser.add_argument("--model", choices=MODELS, default="alexnet")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--images", type=int, default=2, help="of each worker's lane")
    parser.add_argument("--rates", nargs="+", choices=RATES, default=list(RATES), help="the first warms up")
    parser.add_argument("--schemes", nargs="+", default=[*SCHEMES, *HOOKS])
    parser.add_argument("--cluster", type=Path, help="what `lockstep probe` wrote, for predictions")
    options = parser.parse_args()
    task = Task(options.model, options.workers, options.images, tuple(options.rates), tuple(options.schemes))
    signal.signal(signal.SIGTERM, leave)
    with shaped_nodes(task.workers, task.rates[0]) as nodes:
        found = talk(nodes, start(nodes, task))
    cluster = read_cluster(options.cluster) if options.cluster else None
    records = make_records(task, found, cluster)
    for record in records:
        print(f"{record.name}: {record.value:.3f} {record.unit} n={record.n} {json.dumps(record.details)}")
    before = read_records(options.output) if options.output.exists() else []
    names = {record.name for record in records}
    write_records(options.output, [*(each for each in before if each.name not in names), *records])


def leave(number: int, frame: object) -> None:
    """End, but leave no node behind; a second signal does not end that."""
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


def start(nodes: ShapedNodes, task: Task) -> list[subprocess.Popen[str]]:
    """A worker in each node; they listen to the first one's commands only."""
    program, told = str(Path(__file__).with_name("slow_worker.py")), json.dumps(asdict(task))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": INTERFACE}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return [
        subprocess.Popen(inside(node, [sys.executable, program, str(rank), told]), env=env, **pipes)
        for rank, node in enumerate(nodes.names)
    ]


def talk(nodes: ShapedNodes, workers: list[subprocess.Popen[str]]) -> dict[str, Any]:
    """Give the links the rates that worker 0 asks for, until it tells what was found."""
    found: dict[str, Any] = {}
    try:
        stdin, stdout = workers[0].stdin, workers[0].stdout
        assert stdin and stdout
        for line in stdout:
            message = json.loads(line)
            found = message.get("found", found)
            if note := message.get("note"):
                print(note, file=sys.stderr, flush=True)
            if rate := message.get("rate"):
                nodes.reshape(rate)
                stdin.write("done\n")
                stdin.flush()
        if any(worker.wait() for worker in workers) or not found:
            raise SystemExit("a worker failed")
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    return found


def make_records(task: Task, found: Mapping[str, Any], cluster: Cluster | None) -> list[Record]:
    """Of links, and of each scheme at each rate its exchange and its step."""
    records = [
        make_record(f"links of {rate}, {task.workers} nodes: each sends to the next at once", speeds, "Gb/s")
        for rate, speeds in found["ring"].items()
    ]
    for scheme in task.schemes:
        is_peer = scheme in HOOKS
        compute_s = statistics.median(found["peer compute" if is_peer else "compute"])
        plain = found.get(HOOKS[0] if is_peer else "none", found[scheme])
        for rate, row in found[scheme].items():
            title, details = f"{task.model}, {task.workers} workers, {rate}, {scheme}", dict[str, Any]()
            if not is_peer:
                details = {"codec_s": row["codec_s"], "times_faster": _faster(plain, rate, row, "exchange")}
                records.append(make_record(f"{title}: exchange", row["exchange"], "s", **details))
                details = {"exchange_s": statistics.median(row["exchange"]), "codec_s": row["codec_s"]}
                details["waited_s"] = row["waited_s"]
                if cluster:
                    network = NetworkRate(LATENCY_US, RATES[rate] / 8)
                    details["planned_s"] = plan_s(task, scheme, replace(cluster, network=network), compute_s)
            details |= {"compute_s": compute_s, "sent_mb": row["sent_mb"], "images": task.images}
            details["times_faster"] = _faster(plain, rate, row, "step")
            records.append(make_record(f"{title}: step", row["step"], "s", **details))
    return records


def _faster(plain: Mapping[str, Any], rate: str, row: Mapping[str, Any], key: str) -> float:
    return round(statistics.median(plain[rate][key]) / statistics.median(row[key]), 3)


def plan_s(task: Task, scheme: str, cluster: Cluster, compute_s: float) -> float:
    """Seconds of a step by the planner, one worker a node."""
    profile = count_profile(task.run(1), SHAPE, CLASSES, task.images)

    def step_s(run: Run, slowdown: float) -> float:
        worker = replace(cluster.worker, slowdown=(slowdown,))
        nodes = replace(cluster, worker=worker, node=NodeShape(1), exchange=())
        return predict(deal_work(run, profile, nodes, Plan(data=run.train.lanes))).total_s

    slowdown = max(compute_s / step_s(task.run(1), 1.0), 1.0)
    return step_s(task.run(task.workers, scheme), slowdown)


if __name__ == "__main__":
    main()
