"""Keeps what `lockstep bench` measured: python benchmarks/lab.py NAME gemm --sizes 4096

Runs `lockstep bench gemm --sizes 4096 --json`, adds the commit, and writes the records to
benchmarks/results/lab-NAME.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from measure import RESULTS, commit


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", help="of the records")
    parser.add_argument("--folder", type=Path, default=RESULTS, help="where they go; default: results")
    parser.add_argument("bench", nargs=argparse.REMAINDER, help="as after `lockstep bench`")
    options = parser.parse_args()
    words = [sys.executable, "-m", "lockstep", "bench", *options.bench, "--json"]
    told = " ".join(["python benchmarks/lab.py", options.name, *options.bench])
    done = subprocess.run(words, stdout=subprocess.PIPE, check=True)
    records = [{**record, "commit": commit(), "command": told} for record in json.loads(done.stdout)]
    path = options.folder / f"lab-{options.name}.json"
    path.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
