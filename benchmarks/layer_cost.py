"""What a grid costs one worker, and what rows over workers bring for large images.

python benchmarks/layer_cost.py cost      one worker: seconds a lane with a grid over those without
python benchmarks/layer_cost.py large     one 1024 × 1024 image a lane, ResNet-18: memory and speed

With one thread a worker, in turns, medians; `cost` also with `--device cuda`, and `--half` for bf16.
Activations are what a lane's forward pass keeps for its backward pass. Memory is what a step adds to a
process: its peak over what it had before the first step.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from measure import RESULTS, make_parser, make_record

from lockstep.data.loader import Lanes
from lockstep.kernels.loss import CrossEntropy
from lockstep.kernels.numerics import prepare_device
from lockstep.lower.lane_by_lane import LaneByLane
from lockstep.models.registry import build_model
from lockstep.parallel.split.axes import Axes
from lockstep.parallel.split.layer_report import list_cells
from lockstep.parallel.split.split_model import split_model
from lockstep.spec import Model, Run
from lockstep.spec.record import write_records

LARGE = ["model.name=resnet18", "model.stem=imagenet", "data.size=1024", "data.channels=3", "train.lanes=2"]
LARGE += ["train.batch=2", "data.num_test=2", "train.epochs=1", "schedule.warmup_epochs=0"]
STEPS = 3
WATCH = "LOCKSTEP_WATCHED"  # the folder where each worker writes what it has seen


def main() -> None:
    parser = make_parser(__doc__, None)
    parser.add_argument("what", choices=["cost", "large"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--half", action="store_true", help="bf16")
    parser.add_argument("--cases", nargs="+", help="of `large`, besides one worker; default: all")
    options = parser.parse_args()
    prepare_device(options.device, 1)
    path = RESULTS / f"layer-{options.what}-{'gpu' if options.device == 'cuda' else 'cpu'}.json"
    path = options.output or path
    for records in [cost(options)] if options.what == "cost" else large(options):
        write_records(path, records)
    for record in records:
        print(f"{record.name}: {record.value:.4g} {record.unit} {record.spread} {json.dumps(record.details)}")


def cost(options: Any) -> list[Any]:
    """ResNet-18 at 224 pixels, by images a lane and grid."""
    records, device, kind = [], torch.device(options.device), "bf16" if options.half else "fp32"
    half = torch.bfloat16 if options.half else None
    for images, limit in ((16, 1.10), (4, 1.20)):
        x, model = torch.randn(images, 3, 224, 224, device=device), _model("resnet18", 224).to(device)
        lanes, loss = Lanes(x, torch.arange(images, device=device) % 10, 1), CrossEntropy()
        graphs, probe_s = {}, {}
        for grid in ((4, 1), (1, 4), (4, 4)):
            start = time.perf_counter()
            graphs[grid] = split_model(model, Axes(*grid), x, half=half)
            probe_s[grid] = round(time.perf_counter() - start, 2)
        ways = {
            grid: LaneByLane(model, loss, 0, half=half, split=split)
            for grid, split in {(1, 1): None, **graphs}.items()
        }
        seconds: dict[tuple[int, int], list[float]] = {grid: [] for grid in ways}
        for turn in range(options.rounds + 1):
            for grid, way in ways.items():
                _sync(device)
                start = time.perf_counter()
                list(way.run(lanes, 0))
                _sync(device)
                if turn:
                    seconds[grid].append(time.perf_counter() - start)
        plain = seconds.pop((1, 1))
        for (bands, slices), own in seconds.items():
            records.append(
                make_record(
                    f"ResNet-18 at 224, {kind}, {images} images a lane, one worker: train.bands={bands}, "
                    f"train.slices={slices} over none",
                    [grid / none for none, grid in zip(plain, own, strict=True)],
                    "x",
                    **({"limit": limit} if slices == 1 and device.type == "cpu" else {}),
                    plain_s=statistics.median(plain),
                    probe_s=probe_s[bands, slices],
                    cells=list_cells(graphs[bands, slices]),
                )
            )
    return records


def _sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def large(options: Any) -> Iterator[list[Any]]:
    """Plans beside one worker without a grid, and one with two threads; what is known after each round."""
    cases: dict[str, list[str]] = {
        "one worker": [],
        "one worker, two threads": ["-o", "train.threads=2"],
        "one worker, train.bands=4": ["-o", "train.bands=4"],
        "spatial=2": ["-o", "train.bands=4", "--plan", "spatial=2"],
        "spatial=4": ["-o", "train.bands=4", "--plan", "spatial=4"],
    }
    if options.cases:
        cases = {name: words for name, words in cases.items() if name in ("one worker", *options.cases)}
    found: dict[str, list[list[dict[str, float]]]] = {name: [] for name in cases}
    for _ in range(options.rounds):
        for name, words in cases.items():
            found[name].append(_watch(words))
        yield tell_large(found)


def tell_large(found: dict[str, list[list[dict[str, float]]]]) -> list[Any]:
    """Records of the rounds so far."""
    plain, records = [rows[0] for rows in found["one worker"]], []
    named = {
        "step_s": "images a second over one worker's",
        "kept_mb": "activations that a lane keeps over one worker's",
        "peak_mb": "memory that a step adds, gradients and exchange too, over one worker's",
    }
    for name, runs in found.items():
        most = [{key: max(row[key] for row in rows) for key in named} for rows in runs]
        for key, what in named.items():
            ratios = [row[key] / one[key] for one, row in zip(plain, most, strict=True)]
            records.append(
                make_record(
                    f"ResNet-18, one 1024 × 1024 image a lane, {name}: {what}",
                    [1 / ratio for ratio in ratios] if key == "step_s" else ratios,
                    "x",
                    **{key: statistics.median(row[key] for row in most)},
                )
            )
    return records


def _watch(words: list[str]) -> list[dict[str, float]]:
    """Train for some steps; what each worker has seen."""
    with tempfile.TemporaryDirectory() as folder:
        keys = [word for key in [*LARGE, f"data.num_train={2 * STEPS}"] for word in ("-o", key)]
        words = [*keys, *words, "--runs-dir", folder, "--name", "run", "--device", "cpu", "--quiet"]
        command = [sys.executable, __file__.replace("layer_cost", "watched_train"), "train", "shapes", *words]
        subprocess.run(command, check=True, env={**os.environ, WATCH: folder}, stdout=subprocess.DEVNULL)
        return [json.loads(path.read_text()) for path in sorted(Path(folder).glob("worker-*.json"))]


def _model(name: str, size: int) -> torch.nn.Module:
    return build_model(Run(model=Model(name=name)), (3, size, size), 10)


if __name__ == "__main__":
    main()
