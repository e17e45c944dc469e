"""Short trainings of emotion48 on a CPU by a number of workers or threads, in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from lockstep.errors import LockstepError
from lockstep.lab.threads.threads_bench import Scaled, SkippedCount

WORKERS, THREADS = "workers", "threads of one worker"
MOST_WORKERS = 8  # lanes of the run
_TRAIN_IMAGES, _TEST_IMAGES, _BATCH = 256, 128, 64
_KEYS = {
    "model.name": "emotion48",
    "data.size": 48,
    "data.classes": 7,
    "data.num_train": _TRAIN_IMAGES,
    "data.num_test": _TEST_IMAGES,
    "train.batch": _BATCH,
    "train.lanes": MOST_WORKERS,
    "schedule.warmup_epochs": 0,
}


def measure_workers(most: int, epochs: int, budget_s: float) -> Iterator[Scaled | SkippedCount]:
    """1, 2, 4, 8 workers, and a worker with 1 and 2 threads, until the budget is spent."""
    counts = [count for count in (1, 2, 4, 8) if count <= most]
    runs = [(WORKERS, count) for count in counts[:2]]
    runs += [(THREADS, count) for count in (2,) if count <= most]
    runs += [(WORKERS, count) for count in counts[2:]]
    begin, longest = time.perf_counter(), 0.0
    cores = len(os.sched_getaffinity(0))
    for kind, count in runs:
        start = time.perf_counter()
        if longest and start - begin + longest > budget_s:
            yield SkippedCount(kind, count, f"the {budget_s:.0f} s for all runs are spent")
        elif kind == THREADS and count > cores:
            yield SkippedCount(kind, count, f"cores: {cores}")
        else:
            found = _train(kind, count, epochs)
            longest = max(longest, time.perf_counter() - start)
            yield found
            if (kind, count) == (WORKERS, 1):
                yield Scaled(THREADS, *_rest(found))


def _rest(found: Scaled) -> tuple[int, int, tuple[float, ...], float, float | None, str]:
    return found.count, found.images, found.seconds, found.loss, found.accuracy, found.weights_sha256


def _train(kind: str, count: int, epochs: int) -> Scaled:
    """Its time is that of the training steps, without the start of processes and without tests."""
    keys = _KEYS | {"train.epochs": epochs, "train.threads": count if kind == THREADS else 1}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "lockstep", "train", "shapes", "--quiet", "--device", "cpu"]
        command += [word for key, value in keys.items() for word in ("-o", f"{key}={value}")]
        command += ["--runs-dir", folder, "--name", "run"]
        command += ["--workers", str(count)] if kind == WORKERS else []
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            raise LockstepError(f"bench threads, {kind}: {count}: {lines[-1] if lines else 'it failed'}")
        rows = Path(folder, "run", "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        summary = json.loads(Path(folder, "run", "summary.json").read_text(encoding="utf-8"))
    steps = [row for row in map(json.loads, rows) if row["kind"] == "step"]
    seconds = sum(_BATCH / row["img_s"] for row in steps)
    images, found = _BATCH * len(steps), (summary["loss"], summary["accuracy"], summary["weights_sha256"])
    return Scaled(kind, count, images, (seconds,), *found)
