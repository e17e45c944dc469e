"""The share of a model's multiplications that is cut, by channels and by rows, after all trials of kernels.

python benchmarks/layer_share.py --cores 16
python benchmarks/layer_share.py --device cuda --keys train.precision=bf16
python benchmarks/layer_share.py --device cuda --models "emotion48 at 48" --keys kernels.set=fused \
    train.precision=bf16 train.bands=1 train.slices=1 train.batch=64 data.num_train=64 --plans channel=2

A run of one step for each model and plan, with train.bands=4 and train.slices=4, at sizes of images where no
convolution has too few rows; the share is what its summary says. What is left is computed by every worker.
With `--device cuda` the workers share one GPU.
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

from layer_plans import U_SHAPED, read_workers
from measure import make_parser, make_record
from plan_matrix import Cores

from lockstep.spec.record import write_records

COMMON = ["train.bands=4", "train.slices=4", "train.lanes=1", "train.batch=2", "data.num_train=2"]
COMMON += ["data.num_test=2", "train.epochs=1", "schedule.warmup_epochs=0", "data.channels=3"]
COMMON += ["kernels.set=stock"]
MODELS = {
    "alexnet at 448": ["model.name=alexnet", "data.size=448"],
    "alexnet at 320": ["model.name=alexnet", "data.size=320"],
    "googlenet at 512": ["model.name=googlenet", "data.size=512"],
    "resnet18, large stem, at 512": ["model.name=resnet18", "model.stem=imagenet", "data.size=512"],
    "resnet18, small stem, at 128": ["model.name=resnet18", "model.stem=cifar", "data.size=128"],
    "vgg11 at 256": ["model.name=vgg11", "data.size=256"],
    "u-shaped at 96 × 72": [],
    "emotion48 at 48": ["model.name=emotion48", "data.size=48"],
}
PLANS = ["channel=2", "channel=4", "spatial=2", "spatial=4"]


def main() -> None:
    parser = make_parser(__doc__, "layer-share-cpu.json")
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--models", nargs="+", default=list(MODELS)[:-1])
    parser.add_argument("--plans", nargs="+", default=PLANS)
    parser.add_argument("--keys", nargs="*", default=[], help="more keys of the runs")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    cores, cases = Cores(max(options.cores, 4)), [(m, p) for m in options.models for p in options.plans]
    with ThreadPoolExecutor(options.cores) as pool:
        records = []
        for run in as_completed([pool.submit(measure, *case, cores, options) for case in cases]):
            records.append(run.result())
            write_records(options.output, records)


def measure(model: str, plan: str, cores: Cores, options: Any) -> Any:
    """One run; which layers are not wholly cut is in the details, with their share."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(U_SHAPED), plan, "10", folder, options.device]
        if MODELS[model]:
            words = [word for key in [*COMMON, *MODELS[model], *options.keys] for word in ("-o", key)]
            words += ["--runs-dir", folder, "--name", "run", "--device", options.device, "--quiet"]
            command = [sys.executable, "-m", "lockstep", "train", "shapes", *words, "--plan", plan]
        try:
            cores.run(read_workers(plan), command, {**os.environ})
            found = json.loads((Path(folder) / "run" / "summary.json").read_text())["layers"]
        except subprocess.CalledProcessError as error:
            found = {"share": float("nan"), "rows": [], "cells": [f"exit code {error.returncode}"]}
    total = sum(row.get("work_mmac", 0.0) for row in found["rows"]) or 1.0
    less = {
        row["layer"]: [row["rule"], round(row["work_mmac"] / total, 4), row["share"]]
        for row in found["rows"]
        if row.get("work_mmac") and row["share"] < 1
    }
    print(f"{model}, {plan}: {found['share']}", flush=True)
    keys = f" ({' '.join(options.keys)})" if options.keys else ""
    name = f"{model}{keys}, {plan}: share of the multiplications that is cut"
    return make_record(
        name, [found["share"]], "of 1", limit=0.9, not_whole=less, cells=found.get("cells", [])
    )


if __name__ == "__main__":
    main()
