"""Test accuracy of a recipe over several seeds, as a record.

    python benchmarks/accuracy.py fashion --seeds 3 --at-least 91 -o data.dir=DIR
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from measure import RESULTS, make_record

import lockstep
from lockstep.spec.file import from_table, merge, parse_overrides, to_table
from lockstep.spec.record import write_records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--at-least", type=float, default=0.0, help="percent; fails below it")
    parser.add_argument("-o", "--override", action="append", default=[])
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/accuracy-RECIPE.json")
    options = parser.parse_args()
    summaries = []
    for seed in range(options.seeds):
        layer = merge(parse_overrides(options.override), {"seed": seed})
        run = from_table(merge(to_table(lockstep.recipe(options.recipe)), layer))
        with tempfile.TemporaryDirectory() as folder:
            launch = lockstep.Launch(name=f"{options.recipe}-seed{seed}", runs_dir=Path(folder))
            summaries.append(lockstep.train(run, launch=launch).summary)
    percents = [100 * summary["accuracy"] for summary in summaries]
    record = make_record(
        f"{options.recipe}: test accuracy after {run.train.epochs} epochs",
        percents,
        "%",
        each=percents,
        img_s=[round(summary["img_s"]) for summary in summaries],
        weights_sha256=[summary["weights_sha256"] for summary in summaries],
    )
    write_records(options.output or RESULTS / f"accuracy-{options.recipe}.json", [record])
    print(f"{record.name}: {record.value:.2f} % (n = {record.n}, {record.spread[0]:.2f}–{record.spread[1]:.2f})")
    sys.exit(0 if min(percents) >= options.at_least else 1)


if __name__ == "__main__":
    main()
