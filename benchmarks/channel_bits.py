"""Layers by name and the hashes they give: those of one worker, or it fails.

python benchmarks/channel_bits.py

AlexNet at 224 × 224 and VGG-11, 20 steps each on a CPU over gloo, with dropout, momentum and clipping; fully
connected layers by channel over 2, 3 and 4 workers. Then runs that go on at step 10 under another plan.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from measure import make_parser, make_record

from lockstep.spec.record import write_records

COMMON = ["train.lanes=8", "train.batch=32", "train.epochs=1", "train.slices=4", "train.clip=1.0"]
COMMON += ["data.num_train=640", "data.num_test=24", "schedule.warmup_epochs=0"]
COMMON += ["checkpoint.every_steps=10", "checkpoint.keep=99"]
MODELS = {
    "alexnet": ["model.name=alexnet", "data.size=224"],
    "vgg11": ["model.name=vgg11", "data.size=32", "train.ema=0.9", "data.augment=flip,crop"],
}
PLANS = [["data=2,layers=hidden*"], ["data=3,layers=hidden*"], ["data=4,layers=hidden1/hidden2"]]
PLANS += [["data=4,layers=hidden*", "data=1"], ["data=2", "data=3,layers=hidden1"]]  # resumed at step 10
HASHES = ("weights_sha256", "optimizer_sha256", "ema_sha256", "loss", "accuracy")


def main() -> None:
    parser = make_parser(__doc__, "channel-bits-cpu.json")
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    options = parser.parse_args()
    records, wrong = [], 0
    for model in options.models:
        alone = train(model, ["data=1"])
        differ = [" then ".join(plans) for plans in PLANS if train(model, plans) != alone]
        wrong += len(differ)
        told = [" then ".join(plans) for plans in PLANS]
        title = f"{model}: plans by layer that give other bits than one worker, after 20 steps"
        found = dict(zip(HASHES, alone, strict=True))
        records.append(make_record(title, [float(len(differ))], "plans", plans=told, differ=differ, **found))
        print(f"{title}: {differ} of {told}", flush=True)
        write_records(options.output, records)
    sys.exit(1 if wrong else 0)


def train(model: str, plans: list[str]) -> list[Any]:
    """The hashes of a run under a plan, or under several: each from step 10 of the one before."""
    keys = [word for key in [*COMMON, *MODELS[model]] for word in ("-o", key)]
    with tempfile.TemporaryDirectory() as folder:
        words = ["--runs-dir", folder, "--device", "cpu", "--quiet"]
        run, start = Path(folder, "run"), ["--name", "run"]
        for plan in plans:
            command = [
                sys.executable,
                "-m",
                "lockstep",
                "train",
                "shapes",
                *keys,
                *words,
                *start,
                "--plan",
                plan,
            ]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            summary = json.loads((run / "summary.json").read_text())
            start = ["--resume", str(run)]
            for path in [*(run / "checkpoints").glob("step-*20*"), run / "summary.json"]:
                path.unlink()
    assert summary["steps"] == 20, summary["steps"]
    return [summary.get(key) for key in HASHES]


if __name__ == "__main__":
    main()
