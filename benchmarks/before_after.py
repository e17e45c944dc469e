"""Images a second of a run by the code of another checkout and by this one, in turn.

git worktree add ../before COMMIT
python benchmarks/before_after.py --before ../before emotion --workers 2 -o train.epochs=2
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from measure import make_parser, make_record

from lockstep.spec.record import read_records, write_records

HERE = Path(__file__).parent.parent


def main() -> None:
    parser = make_parser(__doc__, "before-after-cpu.json")
    parser.add_argument("recipe")
    parser.add_argument("--before", type=Path, required=True, help="a checkout of the older code")
    parser.add_argument("--workers", default="1")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("-o", "--override", action="append", default=[])
    options = parser.parse_args()
    words = [options.recipe, "--workers", options.workers]
    words += [word for override in options.override for word in ("-o", override)]
    found: dict[Path, list[dict[str, float]]] = {options.before: [], HERE: []}
    for number in range(options.rounds):
        order = list(found)[:: 1 if number % 2 else -1]  # neither is always the first
        for folder in order:
            found[folder].append(train(folder, words))
    before, after = ([each["img_s"] for each in rows] for rows in found.values())
    told = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=options.before,
        capture_output=True,
        text=True,
        check=True,
    )
    hashes = {each["weights_sha256"] for rows in found.values() for each in rows}
    record = make_record(
        f"{options.recipe}, {options.workers} workers: img/s now over img/s before",
        [now / then for now, then in zip(after, before, strict=True)],
        "ratio",
        before_commit=told.stdout.strip(),
        before_img_s=statistics.median(before),
        after_img_s=statistics.median(after),
        same_weights=len(hashes) == 1,
    )
    print(f"{record.name}: {record.value:.3f} {record.spread} n = {record.n} {dict(record.details)}")
    known = read_records(options.output) if options.output.exists() else []
    write_records(options.output, [*(each for each in known if each.name != record.name), record])


def train(folder: Path, words: list[str]) -> dict[str, float]:
    """The summary of a run by the code in a folder."""
    with tempfile.TemporaryDirectory() as runs:
        command = [sys.executable, "-m", "lockstep", "train", *words, "--name", "run", "--runs-dir", runs]
        env = {**os.environ, "PYTHONPATH": str(folder)}
        subprocess.run(command, env=env, cwd=runs, check=True, stdout=subprocess.DEVNULL)
        summary: dict[str, float] = json.loads(Path(runs, "run", "summary.json").read_text())
        return summary


if __name__ == "__main__":
    main()
