"""Two stages of a pipeline on two cores beside one worker: images a second, waiting time, memory.

python benchmarks/pipeline.py

Whole runs of `lockstep train` in turns: one worker, two stages by 1f1b, two by gpipe. A ratio is that of two
runs in a row. All must end with one hash.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from measure import make_parser, make_record

from lockstep.parallel.schedule import bubble
from lockstep.spec.record import Record, write_records

LANES, STAGES, LIMIT = 8, 2, 1.5
KEYS = [f"train.lanes={LANES}", "train.batch=64", "train.epochs=1", "data.size=32", "data.num_train=512"]
KEYS += ["data.num_test=64", "schedule.warmup_epochs=0"]
WAYS = {"one worker": [], "1f1b": ["--plan", "pipeline=2"], "gpipe": ["--plan", "pipeline=2,schedule=gpipe"]}


def main() -> None:
    parser = make_parser(__doc__, "pipeline-cpu.json")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", nargs="+", default=["resnet18", "vgg11"])
    options = parser.parse_args()
    records = [record for model in options.models for record in compare(model, options.rounds)]
    for record in records:
        print(f"{record.name}: {record.value:.3f} {record.spread} {json.dumps(record.details)}")
    write_records(options.output, records)


def compare(model: str, rounds: int) -> list[Record]:
    """The ways to train a model, in turns."""
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for number in range(rounds):
        for way in list(WAYS)[:: 1 if number % 2 else -1]:
            found[way].append(train(model, WAYS[way]))
            print(f"{model}, {way}: {found[way][-1]['img_s']:.1f} img/s", flush=True)
    hashes = {summary["weights_sha256"] for runs in found.values() for summary in runs}
    assert len(hashes) == 1, "not one hash"
    formula = bubble(STAGES, LANES)
    return [
        make_record(
            f"{model}, {STAGES} stages on 2 cores over one worker, {LANES} lanes of 8, {way}",
            [mine["img_s"] / one["img_s"] for mine, one in zip(found[way], found["one worker"], strict=True)],
            "x",
            limit=LIMIT,
            bubble_by_formula=round(formula, 4),
            **{f"stage {number}": middle(found[way], number) for number in range(STAGES)},
        )
        for way in list(WAYS)[1:]
    ]


def train(model: str, flags: list[str]) -> dict[str, Any]:
    """The summary of one run."""
    keys = [word for key in [*KEYS, f"model.name={model}"] for word in ("-o", key)]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "lockstep", "train", "shapes", *keys, *flags, "--quiet"]
        subprocess.run([*command, "--runs-dir", folder, "--name", "run", "--device", "cpu"], check=True)
        summary: dict[str, Any] = json.loads((Path(folder) / "run" / "summary.json").read_text())
        return summary


def middle(runs: list[dict[str, Any]], stage: int) -> dict[str, float]:
    """The median of each number of a stage."""
    rows = [run["stages"][stage] for run in runs]
    return {
        key: statistics.median(row[key] for row in rows)
        for key in rows[0]
        if key not in ("stage", "timeline")
    }


if __name__ == "__main__":
    main()
