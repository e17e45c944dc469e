"""Two workers beside two independent processes, and how soon four workers train beside torchrun.

scaling: two processes, in turn each training alone (B = 256, V = 8) and both as the two workers of one run;
emotion48, one thread a process. The figure is the two workers' img/s over the sum of the two processes',
round by round; beside it stands what two reach that exchange nothing and only wait for each other.
start: seconds from the command to the first committed step, our launcher and torchrun in turn.

python benchmarks/workers.py --rounds 20
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from measure import make_parser, make_record

from lockstep.comm.group import Group
from lockstep.comm.mesh import plain_mesh
from lockstep.comm.tree import worker_lanes
from lockstep.data.loader import Lanes
from lockstep.elastic.job import Job
from lockstep.elastic.launcher import Launcher
from lockstep.elastic.worker_groups import WorkerGroups
from lockstep.kernels.loss import make_loss
from lockstep.kernels.numerics import prepare_device
from lockstep.lower.choose import Sample, lower_for_host
from lockstep.models import build
from lockstep.runs.train_state import TrainState
from lockstep.spec import Optimizer, Run, Train
from lockstep.spec.record import Record, write_records
from lockstep.spec.world import read_world
from lockstep.train.step import Step

BATCH, LANES = 256, 8
START = ("data.num_train=2048", "train.epochs=1")


def main() -> None:
    parser = make_parser(__doc__, "workers-cpu.json")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=4, help="of each kind in a round")
    options = parser.parse_args()
    world = read_world(os.environ)
    if world is None:
        job = Job(2, 2, is_elastic=False)
        code = Launcher(job, lambda worker, line: print(f"[{worker}] {line}", file=sys.stderr)).run()
        if code:
            raise SystemExit(code)
        with tempfile.TemporaryDirectory() as folder:
            record = start(Path(folder), max(options.rounds // 3, 3))
        print(f"{record.name}: {record.value:.3f} {record.spread} {record.details}")
        write_records(
            options.output.with_name(options.output.stem.replace("workers", "start") + ".json"), [record]
        )
        return
    device = prepare_device("cpu", threads=1)
    group = WorkerGroups(world, "gloo", device).next()
    record = scaling(group, options.rounds, options.steps)
    if not group.rank:
        print(f"{record.name}: {record.value:.3f} {record.spread} {record.details}", flush=True)
        write_records(options.output, [record])
    group.close()


def scaling(group: Group, rounds: int, steps: int) -> Record:
    half = Run(train=Train(batch=BATCH // 2, lanes=LANES // 2), optimizer=Optimizer("momentum", lr=1e-3))
    ways = {
        "two processes": make_step(Group()),
        "two workers": make_step(group),
        "two that only wait for each other": make_step(Group(), half),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, (step, batch) in ways.items():
            group.barrier()
            begin = time.perf_counter()
            for _ in range(steps):
                step(batch)
                if "wait" in name:
                    group.barrier()
            speed = torch.tensor([BATCH * steps / (time.perf_counter() - begin)], dtype=torch.float64)
            every = torch.zeros(group.size, dtype=torch.float64)
            group.all_gather(every, speed)
            if number:  # the first one makes primitives and fills caches
                found[name].append(float(every.sum() if name == "two processes" else every.min()))
    ratios = [a / b for a, b in zip(found["two workers"], found["two processes"], strict=True)]
    details = {f"{name} img/s": round(statistics.median(values), 1) for name, values in found.items()}
    average = {name: statistics.mean(values) for name, values in found.items()}
    means = {f"{name}, ratio of means": average[name] / average["two processes"] for name in list(ways)[1:]}
    name = "emotion48, B=256, V=8: two workers over two independent processes"
    return make_record(name, ratios, "x", limit=0.95, **means, **details)


def make_step(group: Group, run: Run | None = None) -> tuple[Step, Lanes]:
    torch.manual_seed(0)
    model = build("emotion48", in_channels=1, num_classes=7, image_size=(48, 48))
    run = run or Run(train=Train(batch=BATCH, lanes=LANES), optimizer=Optimizer("momentum", lr=1e-3))
    state = TrainState.begin(model, run.optimizer, 0.0)
    own = worker_lanes(run.train.lanes, group.size, group.rank)
    count = BATCH // LANES * len(own)
    batch = Lanes(torch.randn(count, 1, 48, 48), torch.randint(0, 7, (count,)), len(own), own.start)
    lowered = lower_for_host(model, make_loss(run.train), seed=0, half=None, sample=Sample(lambda: batch))
    return Step(run, state, lowered, 100, plain_mesh(group)), batch


def start(folder: Path, rounds: int) -> Record:
    found: dict[str, list[float]] = {"ours": [], "torchrun": []}
    for number in range(rounds):
        for name, seconds in found.items():
            run = folder / f"start-{name}-{number}"
            command = train(run, START)
            if name == "ours":
                command += ["--workers", "4"]
            else:
                torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
                command = [sys.executable, *torchrun, *command[1:]]
            seconds.append(first_step(command, run / "run" / "metrics.jsonl"))
        print({name: round(values[-1], 2) for name, values in found.items()}, flush=True)
    medians = {f"{name} s": round(statistics.median(values), 2) for name, values in found.items()}
    return make_record("4 workers: seconds to the first step", found["ours"], "s", limit=10, **medians)


def train(runs_dir: Path, overrides: tuple[str, ...], *flags: str) -> list[str]:
    keys = [part for item in overrides for part in ("-o", item)]
    command = [sys.executable, "-m", "lockstep", "train", "--runs-dir", str(runs_dir), "--name", "run"]
    return [*command, "--device", "cpu", *keys, *flags]


def first_step(command: list[str], metrics: Path) -> float:
    begin = time.perf_counter()
    with subprocess.Popen(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        while not (metrics.is_file() and metrics.stat().st_size):
            assert process.poll() is None, "it ended without a step"
            time.sleep(0.005)
        seconds = time.perf_counter() - begin
        assert process.wait() == 0
    return seconds


if __name__ == "__main__":
    main()
