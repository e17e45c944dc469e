"""Lockstep: `lockstep train` as its users start it, and `lockstep.predictor` of the trained run."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import torch

import lockstep
from lockstep.lab.baselines.baseline_task import Array, BaselineTask, read_task
from lockstep.lab.baselines.contest import Outcome, find_accuracy, time_inference, write_outcome


def overrides_of(task: BaselineTask) -> list[str]:
    """What makes of the recipe `emotion` the task's run."""
    keys = {
        "seed": task.seed,
        "data.num_train": task.images,
        "data.num_test": task.tests,
        "train.batch": task.batch,
        "train.epochs": task.epochs,
        "train.lanes": task.lanes,
        "train.precision": task.precision,
        "train.channels_last": str(task.device == "cpu").lower(),  # as the others are there
        "optimizer.name": "sgd",
        "optimizer.lr": task.rate,
        "optimizer.weight_decay": 0,
        "schedule.name": "constant",
        "schedule.warmup_epochs": 0,
    }
    return [f"{key}={value}" for key, value in keys.items()]


def _main() -> None:
    task, started = read_task(sys.argv[1]), float(sys.argv[2])
    command = [sys.executable, "-m", "lockstep", "train", "emotion", "--quiet", "--device", task.device]
    command += ["--runs-dir", task.folder, "--name", "run"]
    command += [word for each in overrides_of(task) for word in ("-o", each)]
    workers = min(task.cores, task.lanes) if task.device == "cpu" else 1
    if workers > 1:
        command += ["--workers", str(workers)]
    if subprocess.run(command, check=False).returncode:
        sys.exit(1)  # it has said why
    whole_s, run = time.time() - started, Path(task.folder, "run")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["kind"] == "step"]
    train_s = sum(task.batch / row["img_s"] for row in steps)
    last = [row["loss"] for row in steps[-len(steps) // task.epochs :]]
    torch.set_num_threads(task.cores)
    predictor = lockstep.predictor(run, device=task.device)

    def predict(images: Array) -> Array:
        chances: torch.Tensor = predictor(torch.from_numpy(images))
        return chances.cpu().numpy()

    tests = task.array("test_bytes")
    outcome = Outcome(
        task.precision,
        whole_s - train_s,
        train_s,
        steps[0]["loss"],
        sum(last) / len(last),
        find_accuracy(predict, tests, task.array("test_labels"), task.batch),
        *time_inference(predict, tests, task.batch),
        weights_sha256=json.loads((run / "summary.json").read_text())["weights_sha256"],
    )
    write_outcome(task, outcome)


if __name__ == "__main__":
    _main()
