"""Every plan and the hashes it gives: those of one worker, or it fails.

python benchmarks/plan_matrix.py --cores 16

Models × (pipeline 2, 3, 4 by both schedules; data 2, 3, 4 with each kind of shard; data 2 × pipeline 2, alone
and with each kind of shard), 20 steps each on a CPU over gloo, with batch norm, dropout, stochastic depth,
augmentation, averaged weights and clipping.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from measure import make_parser, make_record

from lockstep.spec.plan import read_plan
from lockstep.spec.record import write_records

COMMON = ["train.lanes=8", "train.batch=32", "train.epochs=1", "data.num_train=640", "data.num_test=45"]
COMMON += ["train.ema=0.9", "train.clip=1.0", "data.augment=flip,crop", "schedule.warmup_epochs=0"]
MODELS = {
    "alexnet": ["model.name=alexnet", "data.size=64", "optimizer.name=adam", "optimizer.lr=0.0003"],
    "googlenet": ["model.name=googlenet", "data.size=32"],
    "resnet18": ["model.name=resnet18", "data.size=16", "optimizer.name=adamw", "optimizer.lr=0.001"],
    "vgg11": ["model.name=vgg11", "data.size=32"],
    "long skip": [],
}
SHARDS = ("optimizer", "gradients", "parameters")
PLANS = [f"pipeline={n}{how}" for n in (2, 3, 4) for how in ("", ",schedule=gpipe")]
PLANS += [f"data={n},shard={kind}" for n in (2, 3, 4) for kind in SHARDS]
PLANS += ["data=2,pipeline=2", *(f"data=2,pipeline=2,shard={kind}" for kind in SHARDS)]
HASHES = ("weights_sha256", "optimizer_sha256", "ema_sha256", "loss", "accuracy")
OWN = Path(__file__).parent / "plan_model.py"


class Cores:
    """Lets as many workers run at once as there are cores."""

    def __init__(self, count: int) -> None:
        self._free, self._changed = count, threading.Condition()

    def run(self, workers: int, command: list[str], env: dict[str, str]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._free >= workers)
            self._free -= workers
        try:
            subprocess.run(command, check=True, env=env, stdout=subprocess.DEVNULL)
        finally:
            with self._changed:
                self._free += workers
                self._changed.notify_all()


def main() -> None:
    parser = make_parser(__doc__, "plans-cpu.json")
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    options = parser.parse_args()
    cores = Cores(max(options.cores, 4))
    records, wrong = [], 0
    for model in options.models:
        with ThreadPoolExecutor(options.cores) as pool:
            every = ["data=1", *PLANS]
            found = dict(
                zip(every, pool.map(lambda plan, m=model: train(m, plan, cores), every), strict=True)
            )
        alone = found["data=1"]
        differ = [plan for plan in PLANS if found[plan] != alone]
        wrong += len(differ)
        print(
            f"{model}: {len(PLANS) - len(differ)} of {len(PLANS)} plans give the bits of one worker {differ}"
        )
        records.append(
            make_record(
                f"{model}: plans that give other bits than one worker, after 20 steps",
                [float(len(differ))],
                "plans",
                plans=PLANS,
                differ=differ,
                **dict(zip(HASHES, alone, strict=True)),
            )
        )
        write_records(options.output, records)
    sys.exit(1 if wrong else 0)


def train(model: str, plan: str, cores: Cores) -> list[Any]:
    """The hashes of a run under a plan."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(OWN), folder]
        if MODELS[model]:
            keys = [word for key in [*COMMON, *MODELS[model]] for word in ("-o", key)]
            words = ["--runs-dir", folder, "--name", "run", "--device", "cpu", "--quiet", "--plan", plan]
            command = [sys.executable, "-m", "lockstep", "train", "shapes", *keys, *words]
        cores.run(read_plan(plan).workers or read_plan(plan).least, command, {**os.environ, "PLAN": plan})
        summary = json.loads((Path(folder) / "run" / "summary.json").read_text())
    assert summary["steps"] == 20, summary["steps"]
    return [summary.get(key) for key in HASHES]


if __name__ == "__main__":
    main()
