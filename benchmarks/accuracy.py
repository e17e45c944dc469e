"""Test accuracy of a recipe over several seeds, as a record.

python benchmarks/accuracy.py fashion --seeds 3 --at-least 91 -o data.dir=DIR
"""

from __future__ import annotations

import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from measure import RESULTS, make_parser, make_record

import lockstep
from lockstep.spec.record import write_records
from lockstep.spec.run_file import from_table, merge, parse_overrides, to_table


def main() -> None:
    parser = make_parser(__doc__, None)
    parser.add_argument("recipe")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--at-least", type=float, default=0.0, help="percent; fails below it")
    parser.add_argument(
        "--jobs", type=int, default=1, help="seeds trained side by side; then img/s means less"
    )
    parser.add_argument("-o", "--override", action="append", default=[])
    options = parser.parse_args()
    work = partial(train, options.recipe, options.override)
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        summaries = list(pool.map(work, range(options.seeds)))
    percents = [100 * summary["accuracy"] for summary in summaries]
    record = make_record(
        f"{options.recipe}: test accuracy after {summaries[0]['epochs']} epochs",
        percents,
        "%",
        each=percents,
        img_s=[round(summary["img_s"]) for summary in summaries],
        weights_sha256=[summary["weights_sha256"] for summary in summaries],
    )
    write_records(options.output or RESULTS / f"accuracy-{options.recipe}.json", [record])
    low, high = record.spread
    print(f"{record.name}: {record.value:.2f} % (n = {record.n}, {low:.2f} to {high:.2f})")
    sys.exit(0 if low >= options.at_least else 1)


def train(recipe: str, overrides: list[str], seed: int) -> dict[str, Any]:
    """One run in a folder of its own; gives its summary."""
    layer = merge(parse_overrides(overrides), {"seed": seed})
    run = from_table(merge(to_table(lockstep.recipe(recipe)), layer))
    with tempfile.TemporaryDirectory() as folder:
        launch = lockstep.Launch(name=f"{recipe}-seed{seed}", runs_dir=Path(folder))
        return lockstep.train(run, launch=launch).summary


if __name__ == "__main__":
    main()
