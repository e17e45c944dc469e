"""Keeps what `lockstep bench` measured: python benchmarks/lab.py NAME gemm --sizes 4096

Runs `lockstep bench gemm --sizes 4096 --json`, adds the commit, and writes the records to
benchmarks/results/lab-NAME.json. With --rounds 3 before NAME it runs three times, and a record is the
median of its three. Records of that file with other names stay.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from measure import RESULTS, commit


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", help="of the records")
    parser.add_argument("--folder", type=Path, default=RESULTS, help="where they go; default: results")
    parser.add_argument("--rounds", type=int, default=1, help="how often the bench runs; default: 1")
    parser.add_argument("bench", nargs=argparse.REMAINDER, help="as after `lockstep bench`")
    options = parser.parse_args()
    words = [sys.executable, "-m", "lockstep", "bench", *options.bench, "--json"]
    rounds = ["--rounds", str(options.rounds)] if options.rounds > 1 else []
    told = " ".join(["python benchmarks/lab.py", *rounds, options.name, *options.bench])
    found: dict[str, list[dict[str, Any]]] = {}
    for _ in range(options.rounds):
        done = subprocess.run(words, stdout=subprocess.PIPE, check=True)
        for record in json.loads(done.stdout):
            found.setdefault(record["name"], []).append({**record, "commit": commit(), "command": told})
    path = options.folder / f"lab-{options.name}.json"
    before = json.loads(path.read_text("utf-8")) if path.exists() else []
    records = [each for each in before if each["name"] not in found]
    records += [join_rounds(rounds) for rounds in found.values()]
    path.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")


def join_rounds(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """The record of the median round, with the spread of all; of one round as it is."""
    if len(rounds) == 1:
        return rounds[0]
    values = sorted(record["value"] for record in rounds)
    median = next(record for record in rounds if record["value"] == values[len(values) // 2])
    return {**median, "n": len(rounds), "spread": [values[0], values[-1]]}


if __name__ == "__main__":
    main()
