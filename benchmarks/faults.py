"""How soon training goes on after a loss, what being ready for one costs, and many losses in one run.

recovery: four workers; a worker is killed (n times), then frozen (n times); the time from the signal to the
next completed step, less the median step, beside torchrun's restart of the same run after a kill.
soak: one run that suffers so many random faults (kill, freeze, two kills at once, kills right after another,
the end of a worker that has just come) within ten minutes; the hash must be that of a calm run, every step
in the metrics once, no process left. With --keys a run that compresses, of which steps are done again.
cost: two workers, emotion48, B = 256, watched by our launcher and with the launcher asleep, in turn.

python benchmarks/faults.py recovery --rounds 20
python benchmarks/faults.py soak --faults 200
python benchmarks/faults.py soak --faults 60 --keys train.compress=top:0.01 checkpoint.every_steps=50
python benchmarks/faults.py cost --rounds 40
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

from measure import RESULTS, make_parser, make_record

from lockstep.spec.record import Record, write_records

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "tests"))
from job import Job, assert_no_step_lost  # noqa: E402

KEYS = [
    "data.size=16",
    "data.num_train=330",
    "data.num_test=10",
    "train.batch=32",
    "train.lanes=4",
    "optimizer.lr=0.005",
]
PATIENCE_S = 60.0
STEPS = 4  # of a turn


def main() -> None:
    parser = make_parser(__doc__, None)
    parser.add_argument("what", choices=("recovery", "soak", "cost"))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--keys", nargs="+", default=[], metavar="KEY=VALUE", help="soak: of a compressed run"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        records = {"recovery": recovery, "soak": soak, "cost": cost}[options.what](options, Path(folder))
    for record in records:
        print(f"{record.name}: {record.value:.4g} {record.unit} {record.spread} {record.details}", flush=True)
    name = f"{options.what}-cpu.json" if not options.keys else f"{options.what}-compress-cpu.json"
    write_records(options.output or RESULTS / name, records)


def train(folder: Path, *flags: str, epochs: int, more: Sequence[str] = ()) -> list[str]:
    """A command that trains LeNet-5 on small shapes, ten steps an epoch."""
    keys = [*KEYS, f"train.epochs={epochs}", "checkpoint.every_steps=1000", *more]
    return [
        sys.executable, "-m", "lockstep", "train", "shapes", "--runs-dir", str(folder), "--name", "run",
        "--device", "cpu", *[part for key in keys for part in ("-o", key)], *flags,
    ]  # fmt: skip


class Watch:
    """Sees the rows of a run's metrics as they are written."""

    def __init__(self, run: Path) -> None:
        self._path, self._at = run / "metrics.jsonl", 0
        self.steps: list[tuple[int, float]] = []  # (step, when it was seen)

    def look(self) -> int:
        """The last step that was written down."""
        if self._path.is_file():
            with self._path.open() as file:
                file.seek(self._at)
                while (line := file.readline()).endswith("\n"):
                    self._at = file.tell()
                    row = json.loads(line)
                    if row["kind"] == "step":
                        self.steps.append((row["step"], time.perf_counter()))
        return self.steps[-1][0] if self.steps else 0

    def wait_for(self, step: int, alive: Callable[[], bool]) -> float:
        """When a step was seen to be completed."""
        end = time.monotonic() + PATIENCE_S
        while self.look() < step:
            assert alive() and time.monotonic() < end, f"no step {step}"
            time.sleep(0.001)
        return next(when for number, when in self.steps if number >= step)


def recovery(options: Namespace, folder: Path) -> list[Record]:
    command = train(folder, "--workers", "4", "--restarts", "1000", epochs=100_000)
    records = []
    with Job(folder, command=command) as job:
        watch, alive = Watch(job.run), lambda: job.process.poll() is None
        watch.wait_for(50, alive)
        for number, name in ((signal.SIGKILL, "kill"), (signal.SIGSTOP, "freeze")):
            found, typical = [], []
            for turn in range(options.rounds):
                job.wait_for(lambda: len(job.workers()) == 4, "four workers")
                before = watch.look() + 30  # all four, at full speed
                watch.wait_for(before, alive)
                gaps = [b[1] - a[1] for a, b in zip(watch.steps[-20:], watch.steps[-19:], strict=False)]
                victim = sorted(job.workers(), key=int)[turn % 4]
                job.kill(victim, number=number)
                sent, last = time.perf_counter(), watch.look()
                seconds = watch.wait_for(last + 2, alive) - sent  # the step under way may still complete
                typical.append(statistics.median(gaps))
                found.append(seconds - 2 * statistics.median(gaps))
            records.append(
                make_record(
                    f"{name} to next completed step, beyond the steps",
                    found,
                    "s",
                    step_s=statistics.median(typical),
                )
            )
        job.process.kill()
    records.append(beside_torchrun(options, folder / "torchrun"))
    return records


def beside_torchrun(options: Namespace, folder: Path) -> Record:
    """torchrun with one restart: all workers start anew and resume from the last checkpoint."""
    found = []
    for turn in range(max(options.rounds // 4, 3)):
        here = folder / str(turn)
        arguments = train(here, "--resume", "auto", epochs=100_000)
        run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        with subprocess.Popen(
            [*run, "--max-restarts=3", *arguments[1:]],
            env=env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ) as process:
            try:
                watch, alive = Watch(here / "run"), lambda: process.poll() is None
                watch.wait_for(50, alive)
                workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
                os.kill(int(workers[turn % 4]), signal.SIGKILL)
                sent, again = time.perf_counter(), Watch(here / "run")
                again.look()
                size = (here / "run" / "metrics.jsonl").stat().st_size
                while (here / "run" / "metrics.jsonl").stat().st_size >= size:
                    assert alive() and time.perf_counter() - sent < PATIENCE_S
                    size = max(size, (here / "run" / "metrics.jsonl").stat().st_size)
                    time.sleep(0.005)
                again = Watch(here / "run")
                rows = again.look()
                found.append(again.wait_for(rows + 1, alive) - sent)
            finally:
                process.terminate()  # its workers are in sessions of their own, and it ends them
                process.wait(PATIENCE_S)
    return make_record("torchrun: kill to next completed step, by its restart", found, "s")


def soak(options: Namespace, folder: Path) -> list[Record]:
    rng, begin = random.Random(options.seed), time.monotonic()
    epochs = options.faults * 6  # the run must outlast its faults
    with Job(folder / "calm", command=train(folder / "calm", epochs=epochs, more=options.keys)) as calm:
        expected = wait_and_hash(calm, PATIENCE_S * 10)
    calm_s, begin = time.monotonic() - begin, time.monotonic()
    count: dict[str, int] = {}
    flags = ["--workers", "4", "--restarts", "100000", "--copy-every", "20"]
    with Job(folder, command=train(folder, *flags, epochs=epochs, more=options.keys)) as job:
        job.wait_for_workers("0")
        while sum(count.values()) < options.faults:
            time.sleep(rng.choice([0.0, 0.02, 0.1, 0.5, 1.5, 2.5]))
            assert job.process.poll() is None, (job.process.communicate()[1], count)
            workers = sorted(job.workers().items(), key=lambda item: int(item[0]))
            if not workers:
                continue
            kind = rng.choice(["kill", "kill", "worker 0", "two", "newest", "freeze"])
            chosen = {
                "kill": [rng.choice(workers)],
                "worker 0": workers[:1],
                "two": rng.sample(workers, min(2, len(workers))),
                "newest": workers[-1:],
                "freeze": [rng.choice(workers)],
            }[kind]
            for _, pid in chosen:
                os.kill(pid, signal.SIGSTOP if kind == "freeze" else signal.SIGKILL)
                count[kind] = count.get(kind, 0) + 1
            if sum(count.values()) % 20 == 0:
                print(f"{sum(count.values())} faults, step {job.steps()}", flush=True)
        found = wait_and_hash(job, PATIENCE_S * 10)
    assert_no_step_lost(job.run)
    seconds = time.monotonic() - begin
    told = json.loads((job.run / "summary.json").read_text())["generations"]
    facts = {"faults": count, "generations": len(told), "calm_s": calm_s, "seconds": seconds}
    facts |= {"keys": options.keys, "steps_done_again": sum(row["undone"] for row in told)}
    same = [0.0 if found == expected else 1.0]
    return [
        make_record("soak: hashes that differ", same, "runs", sha=found["weights_sha256"], **facts),
        make_record("soak: faults in one run", [float(sum(count.values()))], "faults", **facts),
    ]


def wait_and_hash(job: Job, seconds: float) -> dict[str, object]:
    """Wait for the end, see that nothing is left, and give what must be the same."""
    job.workers()
    job.process.communicate(timeout=seconds)
    assert job.process.returncode == 0
    job.assert_no_orphan()
    return dict(job.hashes())


def cost(options: Namespace, folder: Path) -> list[Record]:
    """One job; its launcher and fork server sleep in every other turn; the workers' own beats are left."""
    keys = ["model.name=emotion48", "data.size=48", "data.num_train=2560", "data.num_test=10"]
    keys += ["train.batch=256", "train.lanes=8", "checkpoint.every_steps=100000"]
    command = [*train(folder, "--workers", "2", epochs=1000), *[part for key in keys for part in ("-o", key)]]
    found: dict[str, list[float]] = {"watched": [], "alone": []}
    with Job(folder, command=command) as job:
        watch, alive = Watch(job.run), lambda: job.process.poll() is None
        watch.wait_for(3, alive)
        watchers = [job.process.pid, job.fork_server()]
        busy, begin = 0.0, 0.0
        for turn in range(2 * options.rounds):
            name = ("watched", "alone")[(turn + turn // 2) % 2]  # each first in every other round
            for pid in watchers:
                os.kill(pid, signal.SIGCONT if name == "watched" else signal.SIGSTOP)
            before, start = sum(map(cpu_s, watchers)), time.monotonic()
            first = watch.look()
            watch.wait_for(first + 1 + STEPS, alive)
            if name == "watched":
                busy, begin = busy + sum(map(cpu_s, watchers)) - before, begin + time.monotonic() - start
            rows = [json.loads(line) for line in (job.run / "metrics.jsonl").open()]
            times = [256 / row["img_s"] for row in rows if row["kind"] == "step" and row["step"] > first + 1]
            found[name].append(statistics.median(times[:STEPS]))
        for pid in watchers:
            os.kill(pid, signal.SIGCONT)
    ratios = [a / b for a, b in zip(*found.values(), strict=True)]
    logs = [math.log(ratio) for ratio in ratios]  # the plain mean of ratios of noisy times is too high
    mean, error = statistics.mean(logs), statistics.stdev(logs) / len(logs) ** 0.5
    facts = {
        "geometric_mean": math.exp(mean),
        "upper_95_percent": round(100 * (math.exp(mean + 1.96 * error) - 1), 2),
        "step_s": statistics.median(found["alone"]),
        "launcher_percent_of_two_cores": round(100 * busy / begin / 2, 3),
    }
    return [make_record("watched step over the same step unwatched", ratios, "ratio", **facts)]


def cpu_s(pid: int) -> float:
    """Processor time that a process has used."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
