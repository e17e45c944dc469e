"""Kill a run with SIGKILL at random moments, resume it each time, and compare it with one left alone.

python benchmarks/kills.py --kills 20
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measure import make_parser, make_record

from lockstep.spec.record import write_records

OVERRIDES = (
    "train.epochs=24",
    "checkpoint.every_steps=20",
    "train.ema=0.99",
    "data.augment=flip,crop,cutout",
)


def main() -> None:
    parser = make_parser(__doc__, "kills-cpu.json")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        whole = finish(Path(folder), "whole")
        moments = random.Random(options.seed)
        steps = []
        for kill in range(options.kills):
            steps.append(train_and_kill(Path(folder), moments.uniform(0.0, 3.0)))
            print(f"kill {kill + 1}: {steps[-1]} steps on disk")
        killed = finish(Path(folder), "killed")
        used = positions(Path(folder) / "killed")
    same = all(killed[key] == whole[key] for key in ("weights_sha256", "optimizer_sha256", "ema_sha256"))
    each_once = all(len(rows) == len(set(rows)) for rows in used.values())
    print(f"same hashes: {same}; every position once an epoch: {each_once} ({len(used)} epochs)")
    record = make_record(
        "runs killed and resumed to other bits than the run left alone",
        [float(not (same and each_once))],
        "runs",
        kills=options.kills,
        steps_on_disk_at_each_kill=steps,
        weights_sha256=whole["weights_sha256"],
    )
    write_records(options.output, [record])
    sys.exit(0 if same and each_once else 1)


def command(folder: Path, name: str) -> list[str]:
    keys = [word for item in OVERRIDES for word in ("-o", item)]
    words = ["--runs-dir", str(folder), "--name", name, "--resume", "auto", "--device", "cpu"]
    return [sys.executable, "-m", "lockstep", "train", "shapes", *words, *keys]


def train_and_kill(folder: Path, wait_s: float) -> int:
    """Start or resume the run, kill it `wait_s` after it began to work; gives the steps on disk."""
    process = subprocess.Popen(command(folder, "killed"), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout
    process.stdout.readline()  # the first line comes when the first step is about to start
    time.sleep(wait_s)
    assert process.poll() is None, "the run ended before all its kills"
    process.kill()
    process.communicate()
    lines = (folder / "killed" / "metrics.jsonl").read_text().splitlines()
    return sum('"kind": "step"' in line for line in lines)


def finish(folder: Path, name: str) -> dict[str, str]:
    subprocess.run(command(folder, name), check=True, stdout=subprocess.DEVNULL)
    return dict(json.loads((folder / name / "summary.json").read_text()))


def positions(directory: Path) -> dict[int, list[int]]:
    """Every position of the order that an epoch's committed steps used."""
    used: dict[int, list[int]] = {}
    for row in map(json.loads, (directory / "metrics.jsonl").read_text().splitlines()):
        if row["kind"] == "step":
            used.setdefault(row["epoch"], []).extend(range(*row["positions"]))
    return used


if __name__ == "__main__":
    main()
