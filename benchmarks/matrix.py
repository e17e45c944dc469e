"""Every way to run the same Run, and the hash it gives; one hash a Run, or it fails.

workers × launcher × backend × model × wire, with batch norm, dropout, augmentation, averaged weights and
clipping; overlap and bucket size in rotation over the cells, or all of them in each cell with --all.

python benchmarks/matrix.py
python benchmarks/matrix.py --device cuda --workers 1 2 4 --launchers lockstep torchrun

The MPIs are those that `make test` puts beside the Python it sets up, or below --mpi.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from measure import make_parser, make_record

import lockstep
from lockstep.spec import Run
from lockstep.spec.record import write_records
from lockstep.spec.run_file import from_table, merge, parse_overrides, to_table
from lockstep.spec.world import read_world

COMMON = ["data.size=16", "data.num_train=40", "data.num_test=21", "data.augment=flip,crop", "train.batch=16"]
COMMON += ["train.lanes=8", "train.epochs=1", "train.ema=0.9", "train.clip=1.0"]
MODELS = {
    "lenet5": COMMON,
    "resnet18": [*COMMON, "model.name=resnet18"],
    "googlenet": [*COMMON, "model.name=googlenet", "data.size=32"],
}
WIRES, BUCKETS_MB = ("fp32", "bf16"), (0.05, 1.0, 25.0)
# launcher → (backends, the MPI's library)
LAUNCHERS: dict[str, tuple[tuple[str, ...], str]] = {
    "lockstep": (("gloo",), ""),
    "torchrun": (("gloo",), ""),
    "openmpi": (("gloo", "mpi"), "libmpi.so.40"),
    "mpich": (("gloo", "mpi"), "libmpi.so.12"),
}


def main() -> None:
    parser = make_parser(__doc__, "matrix-cpu.json")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--all", action="store_true", help="every overlap and bucket size in each cell")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 3, 4, 5, 7, 8])
    parser.add_argument("--launchers", nargs="+", default=list(LAUNCHERS))
    parser.add_argument("--jobs", type=int, default=1, help="cells at a time, where there are cores for it")
    parser.add_argument("--mpi", type=Path, default=Path(sys.prefix), help="holds openmpi/ and mpich/")
    parser.add_argument("--cell", type=Path, help=argparse.SUPPRESS)  # one launch: where its hashes go
    parser.add_argument("--backend", default="gloo", help=argparse.SUPPRESS)
    parser.add_argument("--turn", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cell:
        fill(options)
        return
    expected: dict[str, str] = {}
    rows, wrong = [], 0
    ways = list(cells(options))
    with ThreadPoolExecutor(options.jobs) as pool:
        results = pool.map(lambda number: launch(options, number, *ways[number]), range(len(ways)))
        for (launcher, backend, workers), found in zip(ways, results, strict=True):
            expected = expected or found
            bad = [key for key, value in found.items() if value != reference(expected, key)]
            wrong += len(bad)
            rows.append(
                {
                    "launcher": launcher,
                    "backend": backend,
                    "workers": workers,
                    "runs": len(found),
                    "other": bad,
                }
            )
            equal = f"{len(found) - len(bad)} of {len(found)} equal {bad[:2] or ''}"
            print(f"{launcher:9} {backend:5} W={workers}  {equal}", flush=True)
    record = make_record("trainings with another hash", [wrong], "runs", cells=rows, hashes=expected)
    write_records(options.output, [record])
    raise SystemExit(1 if wrong else 0)


def cells(options: argparse.Namespace) -> Iterator[tuple[str, str, int]]:
    for launcher in options.launchers:
        for backend, workers in itertools.product(LAUNCHERS[launcher][0], options.workers):
            alone = launcher == options.launchers[0] and backend == "gloo"  # one worker has no backend
            if workers > 1 or alone:
                yield launcher, backend, workers


def reference(expected: dict[str, str], key: str) -> str:
    """The hash of the same Run by the first cell; overlap and bucket size are not part of a Run."""
    run = key.rpartition(":")[0]
    return next(value for name, value in expected.items() if name.startswith(run))


def launch(
    options: argparse.Namespace, turn: int, launcher: str, backend: str, workers: int
) -> dict[str, str]:
    """Start one cell and read its hashes."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "hashes.json"
        cell = [__file__, "--cell", str(output), "--backend", backend, "--device", options.device]
        cell += ["--turn", str(turn), *(["--all"] if options.all else [])]
        command = [sys.executable, *cell, "--workers", str(workers)]
        if launcher == "torchrun":
            torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"]
            command = [sys.executable, *torchrun, *cell]
        elif launcher != "lockstep":
            prefix = options.mpi / launcher
            env["MPI4PY_LIBMPI"] = str(prefix / "lib" / LAUNCHERS[launcher][1])
            flags = ["--allow-run-as-root", "--oversubscribe"] if launcher == "openmpi" else []
            command = [str(prefix / "bin" / "mpirun"), *flags, "-n", str(workers), sys.executable, *cell]
        subprocess.run(command, check=True, env=env, stdout=subprocess.DEVNULL)
        found: dict[str, str] = json.loads(output.read_text())
    return found


def fill(options: argparse.Namespace) -> None:
    """All trainings of one cell, in the same workers one after another."""
    world = read_world(os.environ)
    workers = options.workers[0] if world is None else None
    found = {}
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        for key, run, extra in trainings(options.all, options.turn):
            launch = lockstep.Launch(
                name="run",
                runs_dir=Path(folder) / key,
                device=options.device,
                workers=workers,
                backend=options.backend,
                **extra,
            )
            result = lockstep.train(run, launch=launch, on_event=lambda event: None)
            hashes = [value for name, value in sorted(result.summary.items()) if name.endswith("_sha256")]
            found[key] = " ".join(value[:16] for value in hashes)
    if world is None or world.rank == 0:
        options.cell.write_text(json.dumps(found))


def trainings(everything: bool, turn: int) -> Iterator[tuple[str, Run, dict[str, Any]]]:
    ways = list(itertools.product((True, False), BUCKETS_MB))
    for number, (model, wire) in enumerate(itertools.product(MODELS, WIRES)):
        overrides = parse_overrides([*MODELS[model], f"train.wire={wire}"])
        run = from_table(merge(to_table(lockstep.recipe("shapes")), overrides))
        for overlap, bucket in ways if everything else [ways[(turn + number) % len(ways)]]:
            key = f"{model} {wire}: {'overlap' if overlap else 'after'} {bucket:g} MB"
            yield key, run, {"overlap": overlap, "bucket_mb": bucket}


if __name__ == "__main__":
    main()
