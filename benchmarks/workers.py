"""Two workers beside two independent processes, and how soon four workers train beside torchrun.

scaling: rounds of (one process; two independent processes at once; one run with two workers), emotion48 at
B = 256, V = 8, one thread a process; the figure is the two workers' img/s over the sum of the two processes'.
start: seconds from the command to the first committed step, our launcher and torchrun in turn.

python benchmarks/workers.py --rounds 7
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measure import make_parser, make_record

from lockstep.spec.record import write_records

ENV = {**os.environ, "OMP_NUM_THREADS": "1"}
SCALING = (
    "model.name=emotion48",
    "data.size=48",
    "data.num_test=8",
    "train.batch=256",
    "train.lanes=8",
    "train.epochs=1",
)
START = ("data.num_train=2048", "train.epochs=1")


def main() -> None:
    parser = make_parser(__doc__, "workers-cpu.json")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        records = [scaling(Path(folder), options.rounds, options.steps), start(Path(folder), options.rounds)]
    for record in records:
        print(f"{record.name}: {record.value:.3f} {record.spread} {record.details}")
    write_records(options.output, records)


def scaling(folder: Path, rounds: int, steps: int):  # type: ignore[no-untyped-def]
    overrides = (*SCALING, f"data.num_train={256 * steps}")
    found: dict[str, list[float]] = {"one process": [], "two processes": [], "two workers": []}
    for number in range(rounds):
        for name, commands in {
            "one process": [()],
            "two processes": [(), ()],
            "two workers": [("--workers", "2")],
        }.items():
            runs = [folder / f"{name}-{number}-{i}".replace(" ", "-") for i in range(len(commands))]
            started = [
                subprocess.Popen(train(run, overrides, *flags), env=ENV, stdout=subprocess.DEVNULL)
                for run, flags in zip(runs, commands, strict=True)
            ]
            assert all(process.wait() == 0 for process in started)
            found[name].append(sum(speed(run / "run") for run in runs))
        print({name: round(values[-1]) for name, values in found.items()}, flush=True)
    ratios = [a / b for a, b in zip(found["two workers"], found["two processes"], strict=True)]
    details = {f"{name} img/s": round(statistics.median(values), 1) for name, values in found.items()}
    return make_record(
        "emotion48, B=256, V=8: two workers over two independent processes",
        ratios,
        "x",
        limit=0.95,
        **details,
    )


def start(folder: Path, rounds: int):  # type: ignore[no-untyped-def]
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
    return [sys.executable, "-m", "lockstep", "train", "--runs-dir", str(runs_dir), "--name", "run", "--device", "cpu", *keys, *flags]  # fmt: skip


def first_step(command: list[str], metrics: Path) -> float:
    begin = time.perf_counter()
    with subprocess.Popen(command, env=ENV, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while not (metrics.is_file() and metrics.stat().st_size):
            assert process.poll() is None, "it ended without a step"
            time.sleep(0.005)
        seconds = time.perf_counter() - begin
        assert process.wait() == 0
    return seconds


def speed(run: Path) -> float:
    """Images a second, without the first two steps, which make primitives and fill caches."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    seconds = [256 / row["img_s"] for row in rows if row["kind"] == "step"][2:]
    return 256 * len(seconds) / sum(seconds)


if __name__ == "__main__":
    main()
