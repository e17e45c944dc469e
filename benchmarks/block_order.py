"""What `data.order=blocks:N` does to accuracy: LeNet-5 on Fashion-MNIST, sorted by class, over seeds.

python benchmarks/block_order.py --data DIR --seeds 5

The images lie in a pack in the order of their classes, as those of a folder do: the worst case, in which a
block has one class. 3 epochs on a CPU; validation images, a tenth of the training images, are counted.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from measure import make_parser, make_record

import lockstep
from lockstep.data.catalog import open_store
from lockstep.spec.record import write_records

KEYS = ["model.name=lenet5", "train.epochs=3", "train.batch=256", "train.lanes=4", "optimizer.lr=0.05"]
KEYS += ["data.name=pack", "data.augment=", "schedule.warmup_epochs=0"]
ORDERS = ("shuffled", "blocks:16", "blocks:64", "blocks:256")


def main() -> None:
    parser = make_parser(__doc__, "block-order-cpu.json")
    parser.add_argument("--data", required=True, type=Path, help="the folder of Fashion-MNIST")
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    records = []
    with tempfile.TemporaryDirectory() as folder:
        pack = Path(folder, "pack")
        lockstep.pack(sorted_by_class(options.data), pack, raw=True)
        for order in ORDERS:
            with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
                seeds = range(options.seeds)
                percents = list(pool.map(lambda seed, order=order: train(order, seed, pack), seeds))
            about = {"each": percents, "mean": round(statistics.mean(percents), 3)}
            name = f"LeNet-5 on Fashion-MNIST sorted by class, {order}: accuracy after 3 epochs"
            records.append(make_record(name, percents, "%", **about))
            print(f"{name}: {percents}", flush=True)
            write_records(options.output, records)


def sorted_by_class(folder: Path) -> tuple[list[Any], list[Any]]:
    """Training and held-out samples, both from the training images."""
    store = open_store("fashion", folder, {"val_fraction": 0.1})
    assert store.val is not None
    return tuple(in_order(split) for split in (store.train, store.val))  # type: ignore[return-value]


def in_order(split: Any) -> list[Any]:
    images, labels = split.read(torch.arange(len(split)))
    order = torch.argsort(labels, stable=True)
    return [(images[i].permute(1, 2, 0).numpy(), int(labels[i])) for i in order.tolist()]


def train(order: str, seed: int, pack: Path) -> float:
    """The accuracy of a run, in percent."""
    keys = [*KEYS, f"data.order={order}", f"seed={seed}", f"data.dir={pack}"]
    words = [word for key in keys for word in ("-o", key)]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "lockstep", "train", "fashion", *words, "--quiet"]
        command += ["--runs-dir", folder, "--name", "run", "--device", "cpu"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        summary = json.loads((Path(folder) / "run" / "summary.json").read_text())
    return round(100 * summary["accuracy"], 2)


if __name__ == "__main__":
    main()
