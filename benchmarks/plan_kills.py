"""Kill random workers of runs under mixed plans with SIGKILL, and compare each run with one left alone.

python benchmarks/plan_kills.py --kills 100

A run suffers five kills, at random moments after its workers have begun, of random workers. The launcher
replaces them. Runs whose plan keeps every part twice must never go back to a checkpoint.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from measure import make_parser, make_record

from lockstep.spec.record import write_records

KEYS = ["train.lanes=8", "train.epochs=40", "data.size=16", "data.num_train=330", "data.num_test=70"]
KEYS += ["train.batch=32", "train.ema=0.9", "train.clip=1.0", "checkpoint.every_steps=10"]
TWICE = ["data=2,pipeline=2", "data=4,shard=parameters,replicas=2", "data=4,shard=optimizer,replicas=2"]
ONCE = [
    "pipeline=2",
    "data=3,shard=gradients",
    "data=2,pipeline=2,shard=parameters",
    "data=2,shard=optimizer",
]
EACH = 5  # kills a run
BACK = "a part of the state is lost"
HASHES = ("weights_sha256", "optimizer_sha256", "ema_sha256", "loss", "accuracy", "steps")


def main() -> None:
    parser = make_parser(__doc__, "plan-kills-cpu.json")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=max(len(os.sched_getaffinity(0)) // 4, 1))
    parser.add_argument("--seed", type=int, default=0, help="of victims and moments")
    options = parser.parse_args()
    runs = options.kills // EACH
    plans = [(TWICE + ONCE)[number % len(TWICE + ONCE)] for number in range(runs)]
    with ThreadPoolExecutor(options.jobs) as pool:
        alone = train("data=1", None)
        found = list(pool.map(train, plans, [random.Random(options.seed + n) for n in range(runs)]))
    bad = [each["plan"] for each in found if each["hashes"] != alone["hashes"]]
    back = [each["plan"] for each in found if each["plan"] in TWICE and each["back"]]
    left = [each["plan"] for each in found if each["left"]]
    kills = sum(each["kills"] for each in found)
    print(f"{kills} kills in {runs} runs: other bits {bad}; back to a checkpoint though kept twice {back}")
    record = make_record(
        "runs under mixed plans whose workers were killed, with other bits than the run left alone",
        [float(len(bad))],
        "runs",
        kills=kills,
        runs={plan: plans.count(plan) for plan in TWICE + ONCE},
        kept_twice_and_yet_back_to_a_checkpoint=back,
        with_processes_left=left,
        back_to_a_checkpoint=sum(each["back"] for each in found),
        hashes=alone["hashes"],
    )
    write_records(options.output, [record])
    sys.exit(1 if bad or left else 0)


def train(plan: str, moments: random.Random | None) -> dict[str, Any]:
    """Train under a plan; `moments` say when to kill whom."""
    keys = [word for key in KEYS for word in ("-o", key)]
    with tempfile.TemporaryDirectory() as folder:
        words = ["--runs-dir", folder, "--name", "run", "--device", "cpu", "--plan", plan, "--restarts", "99"]
        command = [sys.executable, "-m", "lockstep", "train", "shapes", *keys, *words]
        log, run = Path(folder) / "log", Path(folder) / "run"
        with log.open("w") as file:
            process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
            kills, seen = 0, set[int]()
            while moments and kills < EACH and process.poll() is None:
                before = _steps(run)
                time.sleep(moments.uniform(0.2, 2.0))
                pids = _workers(process.pid)
                seen |= set(pids)
                if pids and _steps(run) > before:  # it trains, so a kill meets a step, not a start
                    os.kill(moments.choice(pids), 9)
                    kills += 1
            process.wait()
        assert process.returncode == 0, log.read_text()[-2000:]
        summary = json.loads((run / "summary.json").read_text())
        told = log.read_text()
    time.sleep(2.0 if seen else 0.0)
    left = [pid for pid in seen if _state(pid) not in ("", "Z", "X")]
    print(f"{plan}: {kills} kills, {told.count(BACK)} times back to a checkpoint", flush=True)
    hashes = [summary[key] for key in HASHES]
    return {"plan": plan, "hashes": hashes, "kills": kills, "back": told.count(BACK), "left": left}


def _workers(launcher: int) -> list[int]:
    """The processes that train: children of the launcher's children."""
    found = [pid for server in _children(launcher) for pid in _children(server)]
    return [pid for pid in found if _state(pid) not in ("", "Z", "X")]


def _children(pid: int) -> list[int]:
    try:
        return [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _steps(run: Path) -> int:
    try:
        return (run / "metrics.jsonl").read_text().count('"kind": "step"')
    except OSError:
        return 0


if __name__ == "__main__":
    main()
