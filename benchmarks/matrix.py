"""Every way to run the same Run, and the hash it gives: one hash a Run, or it fails.

workers × launcher × backend × model × wire type, with batch norm, dropout, augmentation, averaged weights and
clipping. The first model takes both wire types in every cell, the others take turns, and so do overlap and
bucket size; with --all every cell has all of them.

Then the same with lanes summed in the order of arrival, as a plain all-reduce does: every Run must now give
another hash for another number of workers, or be refused since its lanes give other bits at once than one by
one. Else the matrix could not have found a wrong order.

python benchmarks/matrix.py --jobs 2
bash benchmarks/gpu.sh matrix-fused

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
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measure import make_parser, make_record

import lockstep
from lockstep.errors import ModelError
from lockstep.spec import Run
from lockstep.spec.record import write_records
from lockstep.spec.run import KERNEL_SETS, PRECISIONS
from lockstep.spec.run_file import from_table, merge, parse_overrides, to_table
from lockstep.spec.world import read_world

COMMON = ["train.lanes=8", "train.epochs=1", "train.ema=0.9", "train.clip=1.0", "data.augment=flip,crop"]
COMMON += ["data.num_test=21", "train.batch=32"]
RESNET18 = ["model.name=resnet18", "data.num_train=133"]  # 4 steps of 4 images a lane, 5 images dropped
GOOGLENET = ["model.name=googlenet", "data.size=32", "data.num_train=101"]
# kernel set → model → what is trained; as many steps and images as two cores can afford
MODELS = {
    "stock": {
        "lenet5": ["data.size=24", "train.batch=64", "data.num_train=389", "train.epochs=2"],
        "resnet18": [*RESNET18, "data.size=16"],
        "googlenet": GOOGLENET,
    },
    "fused": {
        "emotion48": ["model.name=emotion48", "model.dropout=0.3", "data.size=48", "data.num_train=389"],
        "resnet18": [*RESNET18, "data.size=32"],
    },
    "compiled": {
        "alexnet": ["model.name=alexnet", "data.size=64", "data.num_train=133", "optimizer.lr=0.01"],
        "googlenet": GOOGLENET,
    },
}
OVERFLOWING = [f"train.loss_scale={2**19}", "train.scale_growth=2"]  # in fp16: some steps are skipped
REFUSED = "refused before the first step"
WIRES, BUCKETS_MB = ("fp32", "bf16"), (0.05, 1.0, 25.0)
# launcher → (backends, the MPI's library)
LAUNCHERS: dict[str, tuple[tuple[str, ...], str]] = {
    "lockstep": (("gloo",), ""),
    "torchrun": (("gloo",), ""),
    "openmpi": (("gloo", "mpi"), "libmpi.so.40"),
    "mpich": (("gloo", "mpi"), "libmpi.so.12"),
}


@dataclass(frozen=True)
class Cell:
    """One launch, in which all its trainings run one after another; `turn` says which."""

    launcher: str
    backend: str
    workers: int
    turn: int
    in_order_of_arrival: bool = False


def main() -> None:
    parser = make_parser(__doc__, "matrix-cpu.json")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--kernels", choices=KERNEL_SETS[1:], default="stock")
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32")
    parser.add_argument("--models", nargs="+", help="some of those that the kernels have")
    parser.add_argument("--all", action="store_true", help="every wire, overlap and bucket in each cell")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 3, 4, 5, 7, 8])
    parser.add_argument("--launchers", nargs="+", default=list(LAUNCHERS))
    parser.add_argument("--jobs", type=int, default=1, help="cells at a time, where there are cores for it")
    parser.add_argument("--mpi", type=Path, default=Path(sys.prefix), help="holds openmpi/ and mpich/")
    parser.add_argument("--cell", help=argparse.SUPPRESS)  # one launch: its Cell
    parser.add_argument("--hashes", type=Path, help=argparse.SUPPRESS)  # and where its hashes go
    options = parser.parse_args()
    if options.cell:
        fill(options, Cell(**json.loads(options.cell)))
        return
    ways = list(cells(options))
    wrong_ways = [Cell(ways[0].launcher, "gloo", workers, 0, True) for workers in options.workers[:3]]
    with ThreadPoolExecutor(options.jobs) as pool:
        results = pool.map(lambda way: launch(options, way), [*ways, *wrong_ways])
        rows, right = compare(ways, results)
        wrong_rows, wrong = compare(wrong_ways, results)
    differ = sum(len(row["other"]) for row in rows)
    blind = [run for run, hashes in wrong.items() if len(hashes) == 1 and hashes != [REFUSED]]
    counts = {"cells": rows, "trainings": sum(row["runs"] for row in rows), "hashes": right}
    name = "with lanes summed in the order of arrival: Runs whose hash is that of any number of workers"
    records = [
        make_record("trainings with another hash", [differ], "runs", **counts),
        make_record(name, [len(blind)], "runs", cells=wrong_rows, hashes=wrong),
    ]
    write_records(options.output, records)
    seen = f"a wrong order shows in {len(wrong) - len(blind)} of {len(wrong)} Runs {blind or ''}"
    print(f"{differ} of {counts['trainings']} differ; {seen}")
    raise SystemExit(1 if differ or blind else 0)


def cells(options: argparse.Namespace) -> Iterator[Cell]:
    """Every way to launch; a stride that is odd lets each number of workers take every turn."""
    stride = len(options.workers) | 1
    ways = [(launcher, backend) for launcher in options.launchers for backend in LAUNCHERS[launcher][0]]
    for number, (launcher, backend) in enumerate(ways):
        for place, workers in enumerate(options.workers):
            if workers > 1 or number == 0:  # one worker has no backend
                yield Cell(launcher, backend, workers, number * stride + place)


def compare(
    ways: list[Cell], results: Iterable[dict[str, str]]
) -> tuple[list[dict[str, Any]], dict[str, list[str]]]:
    """A row a cell, with the trainings whose hash is not the first of their Run; and each Run's hashes."""
    rows: list[dict[str, Any]] = []
    hashes: dict[str, list[str]] = {}
    for way, found in zip(ways, results, strict=False):
        other = []
        for key, value in found.items():
            known = hashes.setdefault(key.rpartition(":")[0], [value])
            if value != known[0]:
                other.append(key)
            if value not in known:
                known.append(value)
        row = {"launcher": way.launcher, "backend": way.backend, "workers": way.workers}
        rows.append({**row, "runs": len(found), "other": other})
        equal = f"{len(found) - len(other)} of {len(found)} equal {other[:2] or ''}"
        order = "lanes in the order of arrival: " if way.in_order_of_arrival else ""
        print(f"{way.launcher:9} {way.backend:5} W={way.workers}  {order}{equal}", flush=True)
    return rows, hashes


def launch(options: argparse.Namespace, cell: Cell) -> dict[str, str]:
    """Start one cell and read its hashes."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "2"}
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "hashes.json"
        script = [__file__, "--cell", json.dumps(vars(cell)), "--hashes", str(output)]
        script += ["--device", options.device, "--kernels", options.kernels, "--precision", options.precision]
        script += [*(["--models", *options.models] if options.models else []), *["--all"] * options.all]
        command = [sys.executable, *script]
        if cell.launcher == "torchrun":
            torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={cell.workers}"]
            command = [sys.executable, *torchrun, *script]
        elif cell.launcher != "lockstep":
            prefix = options.mpi / cell.launcher
            env["MPI4PY_LIBMPI"] = str(prefix / "lib" / LAUNCHERS[cell.launcher][1])
            flags = ["--allow-run-as-root", "--oversubscribe"] if cell.launcher == "openmpi" else []
            command = [str(prefix / "bin" / "mpirun"), *flags, "-n", str(cell.workers), *command]
        subprocess.run(command, check=True, env=env, stdout=subprocess.DEVNULL)
        found: dict[str, str] = json.loads(output.read_text())
    return found


def fill(options: argparse.Namespace, cell: Cell) -> None:
    """All trainings of one cell, in the same workers one after another."""
    if cell.in_order_of_arrival:
        sum_in_order_of_arrival()
    world = read_world(os.environ)
    workers = cell.workers if world is None else None
    found = {}
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        for key, run, extra in trainings(options, cell.turn):
            launch = lockstep.Launch(
                name="run",
                runs_dir=Path(folder) / key,
                device=options.device,
                workers=workers,
                backend=cell.backend,
                **extra,
            )
            try:
                result = lockstep.train(run, launch=launch, on_event=lambda event: None)
            except ModelError:
                if not cell.in_order_of_arrival:
                    raise
                found[key] = REFUSED
                continue
            hashes = [value for name, value in sorted(result.summary.items()) if name.endswith("_sha256")]
            found[key] = " ".join(value[:16] for value in hashes)
            if skipped := result.summary.get("skipped_steps"):
                found[key] += f" {skipped} skipped"
    if world is None or world.rank == 0:
        options.hashes.write_text(json.dumps(found))


def trainings(options: argparse.Namespace, turn: int) -> Iterator[tuple[str, Run, dict[str, Any]]]:
    """The Runs of a cell, and how each is launched; the first cell has every Run."""
    models = MODELS[options.kernels]
    chosen = options.models or list(models)
    ways = list(itertools.product((True, False), BUCKETS_MB))
    settings = [f"kernels.set={options.kernels}", f"train.precision={options.precision}"]
    settings += OVERFLOWING if options.precision == "fp16" else []
    for number, model in enumerate(chosen):
        takes_both = options.all or turn == 0 or number == 0
        for place, wire in enumerate(WIRES):
            if not takes_both and (turn + number) % 2 != place:
                continue
            overrides = parse_overrides([*COMMON, *models[model], *settings, f"train.wire={wire}"])
            run = from_table(merge(to_table(lockstep.recipe("shapes")), overrides))
            every = ways if options.all else [ways[(turn + 2 * number + place) % len(ways)]]
            for overlap, bucket in every:
                key = f"{model} {wire}: {'overlap' if overlap else 'after'} {bucket:g} MB"
                yield key, run, {"overlap": overlap, "bucket_mb": bucket}


def sum_in_order_of_arrival() -> None:
    """Make the lane tree wrong: a subtree's lanes, and then the workers' subtrees, are added one by one."""
    import torch

    from lockstep.comm.tree import LaneTree, Leaf

    def add(tree: Any, leaf: Leaf, height: int = 0) -> None:
        first, leaves = tree._next, [tree._round(leaf)]
        tree._next += 1 << height
        while tree._partial and tree._partial[-1][1] == height and tree._partial[-1][0] % (2 << height) == 0:
            first, _, earlier = tree._partial.pop()
            leaves, height = [*earlier, *leaves], height + 1
        tree._partial.append((first, height, leaves))

    def roots(tree: Any) -> list[tuple[int, int, Leaf]]:
        for _, _, leaves in tree._partial:
            while len(leaves) > 1:
                if leaves[0]:
                    torch._foreach_add_(leaves[0], leaves.pop(1))
                else:
                    leaves.pop(1)
                leaves[0] = tree._round(leaves[0])
        return [(first, height, leaves[0]) for first, height, leaves in tree._partial]

    wrong: Any = LaneTree
    wrong.add, wrong.roots, wrong.root = add, roots, lambda tree: roots(tree)[0][1:]


if __name__ == "__main__":
    main()
