"""Inference on one GPU: this engine beside PyTorch eager and compiled, from uint8 images to probabilities.

Same weights, images, precision and batch; the images lie on the GPU. Variants take turns in one process.

python benchmarks/gpu_inference.py --model emotion48 --batch 1,8192 --rounds 7
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from gpu_step import MODELS, split
from measure import RESULTS, make_parser, make_record
from torch import Tensor

import lockstep
from lockstep.kernels.numerics import half_precision
from lockstep.runs.predictor import Predictor
from lockstep.runs.trained_run import Trained, open_trained
from lockstep.spec.record import Record, write_records

ROUND_S = 0.2


def main() -> None:
    parser = make_parser(__doc__, None)
    parser.add_argument("--model", choices=[*MODELS], default="emotion48")
    parser.add_argument("--batch", type=split, default=["1", "8192"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--modes", type=split, default=["reduce-overhead", "max-autotune"], help="of torch.compile"
    )
    options = parser.parse_args()
    records: list[Record] = []
    with tempfile.TemporaryDirectory() as folder:
        trained = train_briefly(options.model, Path(folder))
        variants = make_variants(trained, options.modes)
        for batch in map(int, options.batch):
            records += measure(options.model, variants, trained, batch, options.rounds)
            write_records(options.output or RESULTS / "gpu-inference.json", records)
    for record in records:
        print(f"{record.name}: {record.value:.4g} {record.unit} {record.spread}")


def train_briefly(model: str, folder: Path) -> Trained:
    """A run of one step, in bf16."""
    in_channels, size, _ = MODELS[model]
    keys = lockstep.Run(
        data=lockstep.Data(
            "shapes", options={"size": size, "channels": in_channels, "num_train": 64, "num_test": 8}
        ),
        model=lockstep.Model(model),
        train=lockstep.Train(epochs=1, batch=64, lanes=8, precision="bf16"),
    )
    launch = lockstep.Launch(name="run", runs_dir=folder, device="cuda")
    lockstep.train(keys, launch=launch, on_event=lambda event: None)
    return open_trained(folder, "run", device="cuda")


def make_variants(trained: Trained, modes: list[str]) -> dict[str, Callable[[Tensor], Tensor]]:
    """Functions of uint8 images on the GPU."""
    model = trained.model.to(memory_format=torch.channels_last)

    @torch.inference_mode()
    def eager(images: Tensor) -> Tensor:
        normal = trained.augment.normalize(images).contiguous(memory_format=torch.channels_last)
        with half_precision(trained.device, torch.bfloat16):
            return model(normal).float().softmax(1)

    compiled = {name: torch.compile(eager, mode=name, dynamic=False) for name in modes}
    return {"lockstep": Predictor(trained), "eager": eager, **compiled}


def measure(
    model: str, variants: dict[str, Callable[[Tensor], Tensor]], trained: Trained, batch: int, rounds: int
) -> list[Record]:
    """Latency of one call that is waited for, and images a second of calls that are not."""
    images = torch.randint(0, 256, (batch, *trained.shape), dtype=torch.uint8, device="cuda")
    latency: dict[str, list[float]] = {name: [] for name in variants}
    speed: dict[str, list[float]] = {name: [] for name in variants}
    for name, predict in variants.items():
        start = time.perf_counter()
        for _ in range(5):
            predict(images)
        torch.cuda.synchronize()
        print(f"{name} is ready for {batch} images after {time.perf_counter() - start:.1f} s", flush=True)
    for _ in range(rounds):
        for name, predict in variants.items():
            latency[name].append(statistics.median(timed(predict, images, 1) for _ in range(50)))
            calls = max(int(ROUND_S / latency[name][-1]), 2)
            speed[name].append(batch * calls / timed(predict, images, calls))
    found = []
    for name in variants:
        where = f"{model}, inference, B = {batch}, {name}"
        found += [make_record(f"{where}: latency", latency[name], "s")]
        found += [make_record(f"{where}: speed", speed[name], "img/s")]
    return found


def timed(predict: Callable[[Tensor], Tensor], images: Tensor, calls: int) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        predict(images)
    torch.cuda.synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
