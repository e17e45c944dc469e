"""Test accuracy over seeds: without a grid, with one, and with one under a plan that cuts every layer.

python benchmarks/cut_accuracy.py --data DIR --seeds 5

LeNet-5 on Fashion-MNIST, 2 epochs, on a CPU. Another grid is another order of sums, so the accuracy may
differ as it does from seed to seed. A plan has to give the very hash of one worker with the same grid.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from measure import make_parser, make_record
from plan_matrix import Cores

from lockstep.spec.record import write_records

KEYS = ["model.name=lenet5", "train.epochs=2", "train.batch=256", "train.lanes=4", "optimizer.lr=0.05"]
GRID = ["train.bands=2", "train.slices=2"]
CASES: dict[str, tuple[list[str], list[str]]] = {
    "no grid": ([], []),
    "bands=2, slices=2": (GRID, []),
    "bands=2, slices=2, over channel=2,spatial=2": (GRID, ["--plan", "channel=2,spatial=2"]),
}


def main() -> None:
    parser = make_parser(__doc__, "cut-accuracy-cpu.json")
    parser.add_argument("--data", required=True, help="the folder of Fashion-MNIST")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    cores, records = Cores(max(options.cores, 4)), []
    cases = [(name, seed) for name in CASES for seed in range(options.seeds)]
    with ThreadPoolExecutor(options.cores) as pool:
        found = list(pool.map(lambda case: train(*case, options.data, cores), cases))
    for name in CASES:
        summaries = [summary for (case, _), summary in zip(cases, found, strict=True) if case == name]
        percents = [round(100 * summary["accuracy"], 2) for summary in summaries]
        records.append(
            make_record(
                f"LeNet-5 on Fashion-MNIST, {name}: test accuracy after 2 epochs",
                percents,
                "%",
                each=percents,
                mean=round(statistics.mean(percents), 3),
                deviation=round(statistics.stdev(percents), 3) if len(percents) > 1 else 0.0,
                weights_sha256=[summary["weights_sha256"] for summary in summaries],
            )
        )
    write_records(options.output, records)
    one, cut = (record.details["weights_sha256"] for record in records[1:])
    sys.exit("the plan gives other bits than one worker" if one != cut else 0)


def train(case: str, seed: int, data: str, cores: Cores) -> dict[str, Any]:
    """The summary of a run."""
    keys, words = CASES[case]
    options = [word for key in [*KEYS, *keys, f"seed={seed}", f"data.dir={data}"] for word in ("-o", key)]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "lockstep", "train", "fashion", *options, *words, "--quiet"]
        command += ["--runs-dir", folder, "--name", "run", "--device", "cpu"]
        cores.run(4 if words else 1, command, {**os.environ})
        summary: dict[str, Any] = json.loads((Path(folder) / "run" / "summary.json").read_text())
    print(f"seed {seed}, {case}: {100 * summary['accuracy']:.2f} %", flush=True)
    return summary


if __name__ == "__main__":
    main()
