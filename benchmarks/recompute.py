"""Memory and time of training on a GPU with `train.recompute`, beside the same run without it.

python benchmarks/recompute.py --model resnet50 --size 224 --batch 64 --lanes 1 --kernels stock compiled

Each run is a process of its own, on a GPU, with procedural images. The peak is the most that torch had
allocated at once; steps are timed after the first ones. The bits must be the same.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from measure import make_parser, make_record

import lockstep
from lockstep.runs.event import StepDone
from lockstep.spec.record import write_records
from lockstep.spec.run_file import from_table, merge, parse_overrides, to_table

FIRST = 4  # steps that are not timed
CASE = "--case"


def main() -> None:
    parser = make_parser(__doc__, "recompute-gpu.json")
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lanes", type=int, default=1)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--kernels", nargs="+", default=["stock", "compiled"])
    options = parser.parse_args()
    records = []
    for kernels in options.kernels:
        keys = [
            *(f"model.name={options.model}", f"data.size={options.size}", f"train.batch={options.batch}"),
            *(f"train.lanes={options.lanes}", f"train.precision={options.precision}", "train.epochs=1"),
            *(f"data.num_train={options.steps * options.batch}", f"data.num_test={options.batch}"),
            *(f"kernels.set={kernels}", "checkpoint.every_steps=100000"),
        ]
        plain, again = (measure([*keys, *more]) for more in ([], ["train.recompute=true"]))
        assert plain["weights_sha256"] == again["weights_sha256"]
        name = (
            f"{options.model}, {options.size} pixels, {options.precision}, {kernels}: recompute over without"
        )
        details = {"batch": options.batch, "lanes": options.lanes, "without": plain, "with": again}
        memory = make_record(f"{name}, peak memory", [again["peak_mb"] / plain["peak_mb"]], "x", **details)
        pairs = zip(again["seconds"], plain["seconds"], strict=True)
        records += [memory, make_record(f"{name}, seconds a step", [a / b for a, b in pairs], "x")]
        for record in records[-2:]:
            print(f"{record.name}: {record.value:.3f} {record.spread} n = {record.n}", flush=True)
    write_records(options.output, records)


def measure(keys: list[str]) -> dict[str, Any]:
    """A run in a process of its own."""
    command = [sys.executable, __file__, CASE, json.dumps(keys)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def train(keys: list[str]) -> None:
    """Train, and print what it took."""
    run = from_table(merge(to_table(lockstep.recipe("shapes")), parse_overrides(keys)))
    seconds: list[float] = []

    def note(event: object) -> None:
        if isinstance(event, StepDone) and event.step > FIRST:
            seconds.append(round(run.train.batch / event.img_s, 6))

    with tempfile.TemporaryDirectory() as folder:
        launch = lockstep.Launch(runs_dir=Path(folder), device="cuda")
        result = lockstep.train(replace(run, seed=1), launch=launch, on_event=note)
        told = {"weights_sha256": result.summary["weights_sha256"], "seconds": seconds}
    print(json.dumps({"peak_mb": round(torch.cuda.max_memory_allocated() / 1e6, 1), **told}))


if __name__ == "__main__":
    if sys.argv[1:2] == [CASE]:
        train(json.loads(sys.argv[2]))
    else:
        main()
