"""Pipelines on one GPU that its workers share: the hashes of plans beside one worker, for every kernel set.

PYTHONPATH=$PWD python benchmarks/gpu_plans.py

Whole runs of `lockstep train` on small data, with gloo, since NCCL takes a GPU for each worker. A record for
each model and kernel set: 1 if all plans end with the hash of one worker, else 0; its details have hashes.
A run that fails counts as another hash, and its error is kept.

python benchmarks/gpu_plans.py --compare OTHER --models resnet18 googlenet --output …/compiled-blocks.json

OTHER is another checkout, one that compiled the whole model at once. gpu_step.py times one worker with
compiled kernels there and here, in turns; a record has the ratio of seconds a step.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from measure import make_parser, make_record

from lockstep.spec.record import Record, read_records, write_records

HERE = Path(__file__).resolve().parents[1]
MODELS = {
    "emotion48": ["data.size=48", "train.batch=256", "train.lanes=8"],
    "lenet5": ["data.size=28", "train.batch=256", "train.lanes=8"],
    "resnet18": ["data.size=32", "train.batch=256", "train.lanes=8"],
    "googlenet": ["data.size=32", "train.batch=128", "train.lanes=4"],
}
KEYS = ["train.epochs=1", "train.precision=bf16", "train.clip=1.0", "train.ema=0.9", "data.num_test=500"]
KEYS += ["schedule.warmup_epochs=0"]
SETS = ("stock", "fused", "compiled")
ONE = "data=1"
SAME = ("weights_sha256", "optimizer_sha256", "ema_sha256", "loss", "accuracy")
LIMIT = 1.03  # what compiling by block may cost one worker


def main() -> None:
    parser = make_parser(__doc__, "plans-gpu.json")
    parser.add_argument("--models", nargs="+", default=["emotion48", "lenet5", "resnet18"], choices=MODELS)
    parser.add_argument("--sets", nargs="+", default=SETS, choices=SETS)
    parser.add_argument("--plans", nargs="+", default=["pipeline=2", "data=2,pipeline=2"])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--compare", type=Path, help="another checkout; measures one worker, compiled")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    records = []
    for model in options.models:
        if options.compare:
            records.append(compare(model, options))
        for kernels in () if options.compare else options.sets:
            if kernels != "fused" or model != "googlenet":  # which is neither a chain nor residual
                records.append(check(model, kernels, options))
                write_records(options.output, records)
    write_records(options.output, records)


def check(model: str, kernels: str, options: Any) -> Record:
    """One worker, then every plan."""
    found = {plan: train(model, kernels, plan, options) for plan in (ONE, *options.plans)}
    same = {
        plan: "error" not in summary and all(summary.get(key) == found[ONE].get(key) for key in SAME)
        for plan, summary in found.items()
    }
    record = make_record(
        f"{model}, {kernels} kernels: plans on one GPU with the bits of one worker",
        [float(all(same.values()))],
        "bool",
        same=same,
        **{plan: shown(summary) for plan, summary in found.items()},
    )
    print(f"{record.name}: {same}", flush=True)
    return record


def shown(summary: dict[str, Any]) -> dict[str, Any]:
    """What a record keeps of a run."""
    stages = [
        {key: value for key, value in stage.items() if key != "timeline"}
        for stage in summary.get("stages", [])
    ]
    kept = {key: summary[key] for key in (*SAME, "img_s", "error") if key in summary}
    return {**kept, "stages": stages} if stages else kept


def compare(model: str, options: Any) -> Record:
    """Seconds a step of one worker here over those of another checkout, in turns."""
    ratios = []
    for number in range(options.rounds):
        ways = [HERE, options.compare.resolve()][:: 1 if number % 2 else -1]
        img_s = {way: time_step(model, way) for way in ways}
        ratios.append(img_s[options.compare.resolve()] / img_s[HERE])
        print(f"{model}, compiled: {ratios[-1]:.4f} x", flush=True)
    return make_record(
        f"{model}, compiled by block, one worker: seconds a step over those compiled whole",
        ratios,
        "x",
        limit=LIMIT,
    )


def time_step(model: str, checkout: Path) -> float:
    """Images a second of one worker with compiled kernels, by a checkout's own gpu_step.py."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "step.json"
        command = [sys.executable, "benchmarks/gpu_step.py", "--model", model, "--batch", "1024"]
        command += ["--kernels", "compiled", "--variants", "lockstep", "--limit", "400"]
        env = {**os.environ, "PYTHONPATH": str(checkout)}
        subprocess.run([*command, "--output", str(output)], check=True, env=env, cwd=checkout)
        (record,) = read_records(output)
        return record.value


def train(model: str, kernels: str, plan: str, options: Any) -> dict[str, Any]:
    """The summary of one run; of one that fails, its error."""
    keys = [*KEYS, *MODELS[model], f"model.name={model}", f"kernels.set={kernels}"]
    batch = int(next(key for key in keys if key.startswith("train.batch")).partition("=")[2])
    keys.append(f"data.num_train={batch * options.steps}")
    words = [word for key in keys for word in ("-o", key)]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "lockstep", "train", "shapes", *words, "--quiet", "--name", "run"]
        command += ["--runs-dir", folder, "--device", options.device]
        command += [] if plan == ONE else ["--plan", plan, "--backend", "gloo"]
        env = {**os.environ, "PYTHONPATH": str(HERE)}
        done = subprocess.run(command, check=False, capture_output=True, text=True, env=env, cwd=HERE)
        if done.returncode:
            print(done.stderr[-2000:], flush=True)
            return {"error": re.sub(r"\s+", " ", done.stderr)[-300:]}
        summary: dict[str, Any] = json.loads((Path(folder) / "run" / "summary.json").read_text())
        return summary


if __name__ == "__main__":
    main()
