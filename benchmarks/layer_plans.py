"""Layers over workers: every model and plan, and the hashes it gives: those of one worker, or it fails.

python benchmarks/layer_plans.py --cores 16

Six models with train.bands=4 and train.slices=4, so that one worker follows the same grid, under plans of 2
to 16 workers over channels, rows, data, pipeline and shares. 20 steps each on a CPU over gloo, with batch
norm, dropout, averaged weights and clipping. `A then B` is a run that goes on under plan B at step 10 of a
run under plan A. With `--device cuda` the workers share one GPU. Fused or compiled kernels, with plans over
channels: --keys kernels.set=fused train.bands=1 train.slices=1 train.precision=bf16.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from measure import make_parser, make_record
from plan_matrix import HASHES, Cores

from lockstep.spec.plan import read_plan
from lockstep.spec.record import write_records

COMMON = ["train.bands=4", "train.slices=4", "train.lanes=4", "train.batch=8", "train.epochs=1"]
COMMON += ["data.num_test=21", "train.ema=0.9", "train.clip=1.0", "data.augment=flip,crop"]
COMMON += ["schedule.warmup_epochs=0", "data.channels=3", "kernels.set=stock"]
MODELS = {
    "alexnet": ["model.name=alexnet", "data.size=127", "optimizer.name=adam", "optimizer.lr=0.0003"],
    "googlenet": ["model.name=googlenet", "data.size=64"],
    "resnet18, small stem": ["model.name=resnet18", "data.size=32", "model.stem=cifar"],
    "resnet18, large stem": ["model.name=resnet18", "data.size=96", "model.stem=imagenet"],
    "vgg11": ["model.name=vgg11", "data.size=64"],
    "emotion48": ["model.name=emotion48", "data.size=48"],
    "u-shaped": [],
}
U_SHAPED = Path(__file__).resolve().parents[1] / "tests" / "parallel" / "u_shaped.py"
PLANS = [f"{axis}={n}" for axis in ("channel", "spatial") for n in (2, 3, 4)]
PLANS += ["channel=2,spatial=2", "data=2,channel=2", "data=2,spatial=2", "data=3,spatial=2"]
PLANS += ["pipeline=2,channel=2", "pipeline=2,spatial=2", "pipeline=2,spatial=2,schedule=gpipe"]
PLANS += [
    f"data=2,{axis}=2,shard={kind}"
    for axis in ("channel", "spatial")
    for kind in ("optimizer", "gradients", "parameters")
]
PLANS += ["data=2,pipeline=2,spatial=2", "pipeline=2,channel=2,spatial=2"]
PLANS += ["data=2,pipeline=2,channel=2,spatial=2,shard=optimizer"]
PLANS += ["spatial=2 then channel=2", "data=1 then data=2,spatial=2,shard=parameters"]


def main() -> None:
    parser = make_parser(__doc__, "layer-plans-cpu.json")
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--models", nargs="+", default=[name for name in MODELS if name != "emotion48"])
    parser.add_argument("--plans", nargs="+", default=PLANS)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--keys", nargs="*", default=[], help="more keys of the run")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    cores = Cores(max(options.cores, *(read_workers(plan) for plan in options.plans)))
    cases = [(model, plan) for model in options.models for plan in ["data=1", *options.plans]]
    cases = [(model, plan) for model, plan in cases if MODELS[model] or " then " not in plan]
    found: dict[str, dict[str, list[Any]]] = {model: {} for model in options.models}
    records: dict[str, Any] = {}
    with ThreadPoolExecutor(options.cores) as pool:
        runs = {pool.submit(train, *case, cores, options): case for case in cases}
        for run in as_completed(runs):
            model, plan = runs[run]
            found[model][plan] = run.result()
            print(f"{len(found[model])} of {model}: {plan}", flush=True)
            if "data=1" in found[model]:  # what has ended is kept if the rest is stopped
                records[model] = tell(model, found[model], options)
                write_records(options.output, list(records.values()))
    for record in records.values():
        print(f"{record.name}: {record.details['differ']} of {len(record.details['plans'])}", flush=True)
    sys.exit(1 if any(record.value for record in records.values()) else 0)


def tell(model: str, found: dict[str, list[Any]], options: Any) -> Any:
    """The record of the plans that have ended."""
    plans, alone = [plan for plan in found if plan != "data=1"], found["data=1"]
    differ = [plan for plan in plans if found[plan] != alone]
    name = f"{model} ({' '.join(options.keys)})" if options.keys else model
    title = f"{name}: plans that give other bits than one worker, after {options.steps} steps"
    count = [float(len(differ))]
    return make_record(title, count, "plans", plans=plans, differ=differ, one_worker=alone)


def train(model: str, plan: str, cores: Cores, options: Any) -> list[Any]:
    """The hashes of a run under a plan, or from step 10 under another; an error in their place."""
    with tempfile.TemporaryDirectory() as folder:
        run, start = Path(folder, "run"), ["--name", "run"]
        for part in plan.split(" then "):
            command = [sys.executable, str(U_SHAPED), part, str(80 * options.steps // 9 + 1), folder]
            command += [options.device]
            if MODELS[model]:
                keys = [*COMMON, *MODELS[model], f"data.num_train={8 * options.steps}", *options.keys]
                if " then " in plan:
                    keys += ["checkpoint.every_steps=10", "checkpoint.keep=9"]
                words = [word for key in keys for word in ("-o", key)]
                words += ["--runs-dir", folder, "--device", options.device, "--quiet", *start]
                command = [sys.executable, "-m", "lockstep", "train", "shapes", *words, "--plan", part]
            try:
                cores.run(read_workers(part), command, {**os.environ})
            except subprocess.CalledProcessError as error:
                return [f"exit code {error.returncode}"]
            summary = json.loads((run / "summary.json").read_text())
            start = ["--resume", str(run)]
            for path in [*(run / "checkpoints").glob("step-*20*"), run / "summary.json"]:
                path.unlink()
    assert summary["steps"] == options.steps, summary["steps"]
    return [summary.get(key) for key in HASHES]


def read_workers(plan: str) -> int:
    return max(found.workers or found.least for found in map(read_plan, plan.split(" then ")))


if __name__ == "__main__":
    main()
