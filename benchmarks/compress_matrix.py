"""Every way to send less, and what large batches need: one hash a run, by any number of workers.

python benchmarks/compress_matrix.py

LeNet-5 on small shapes, 20 steps (60 where lanes take several by themselves), with averaged weights and
clipping: by one worker, and by 2, 3, 4 and 8; by 3 of which two are killed, one after the other; by 4 that
are stopped after five steps or more and resumed by 2. A hash is of weights, optimizer, averages and of what
compression remembers.
"""

from __future__ import annotations

import random
import signal
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from measure import make_parser, make_record

from lockstep.spec.record import write_records

sys.path.append(str(Path(__file__).parent.parent / "tests"))
from job import Job, assert_no_step_lost
from small import summary, train_command

COMMON = ("train.lanes=8", "train.ema=0.9", "train.clip=1.0", "checkpoint.every_steps=7")
LARGE = ("optimizer.name=lars", "optimizer.lr=0.5"), ("optimizer.name=lamb", "optimizer.lr=0.01")
ROUNDS = "train.local_steps=4", "train.epochs=6"  # enough rounds to be killed in
RUNS = {
    **{kind: (f"train.compress={kind}",) for kind in ("none", "bf16", "fp8", "int8", "top:0.01", "rank:4")},
    "lars": LARGE[0],
    "lamb": LARGE[1],
    "muon": ("optimizer.name=muon",),
    "lamb, rank:4": (*LARGE[1], "train.compress=rank:4"),
    "muon, top:0.01": ("optimizer.name=muon", "train.compress=top:0.01"),
    "int8 from the second epoch on": ("train.compress=int8", "train.compress_after=1"),
    "local_steps=4": ROUNDS,
    "local_steps=4, int8": (*ROUNDS, "train.compress=int8"),
    "top:0.01, a batch that grows": ("train.compress=top:0.01", "train.batch=32@0,64@1"),
}
WAYS = ("1", "2", "3", "4", "8", "3, two killed", "4, then 2")
COPY_EVERY = ("--copy-every", "4")


def main() -> None:
    parser = make_parser(__doc__, "matrix-compress-cpu.json")
    parser.add_argument("--runs", nargs="+", choices=list(RUNS), default=list(RUNS), metavar="RUN")
    parser.add_argument("--jobs", type=int, default=2, help="trainings at a time")
    parser.add_argument("--seed", type=int, default=0, help="of who is killed when")
    options = parser.parse_args()
    cells = [(run, way) for run in options.runs for way in WAYS]
    with ThreadPoolExecutor(options.jobs) as pool:
        found = list(pool.map(lambda cell: train(*cell, options.seed), cells))
    hashes = dict(zip(cells, found, strict=True))
    alone = {run: hashes[run, "1"]["hashes"] for run in options.runs}
    differ = [cell for cell, each in hashes.items() if each["hashes"] != alone[cell[0]]]
    again = {f"{run}: {way}": each["undone"] for (run, way), each in hashes.items() if each["undone"]}
    record = make_record(
        "trainings with another hash than by one worker",
        [float(len(differ))],
        "runs",
        trainings=len(cells),
        ways=WAYS,
        differ=differ,
        steps_done_again=again,
        hashes=alone,
    )
    write_records(options.output, [record])
    print(f"{len(differ)} of {len(cells)} trainings of {len(alone)} runs differ {differ or ''}")
    raise SystemExit(1 if differ else 0)


def train(run: str, way: str, seed: int) -> dict[str, Any]:
    """Train one run in one way; gives its hashes, and how many steps were done again."""
    moments, overrides = random.Random(f"{seed} {run} {way}"), (*COMMON, *RUNS[run])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if way == "3, two killed":
            hurt(folder, overrides, moments)
        elif way == "4, then 2":
            with Job(folder, "--workers", "4", overrides=overrides, paced=True) as job:
                job.wait_for_steps(moments.randint(5, 8))
                job.process.send_signal(signal.SIGTERM)
                job.hurry()
                job.finish(143)
            finish(folder, overrides, "--workers", "2", "--resume", "auto")
        else:
            finish(folder, overrides, "--workers", way)
        assert_no_step_lost(folder / "run")
        found = summary(folder / "run")
    hashes = {key: value for key, value in found.items() if key.endswith("_sha256") or key == "loss"}
    undone = sum(row["undone"] for row in found["generations"])
    again = f", {undone} steps done again" if undone else ""
    print(f"{run}, {way}: {found['weights_sha256'][:16]}{again}", flush=True)
    return {"hashes": hashes, "undone": undone}


def finish(folder: Path, overrides: tuple[str, ...], *flags: str) -> None:
    """Train to the end."""
    with Job(folder, command=train_command(folder, *flags, overrides=overrides)) as job:
        job.finish()


def hurt(folder: Path, overrides: tuple[str, ...], moments: random.Random) -> None:
    """Train by three workers, of which one is killed, and then one of those that are there by then."""
    with Job(folder, "--workers", "3", *COPY_EVERY, overrides=overrides, paced=True) as job:
        for number in (1, 2):
            before = job.steps()
            job.wait_for_steps(min(before + moments.randint(1, 4), 18))
            job.kill(moments.choice(sorted(job.wait_for(lambda: len(w := job.workers()) > 1 and w))))
            job.wait_for(lambda least=number: len(job.generations()) >= least, "the next generation")
        job.hurry()
        job.finish()


if __name__ == "__main__":
    main()
