"""Lightning with lanes beside Lightning's own strategies: the same model, data and batch, in turns.

python benchmarks/lightning_overhead.py            # two workers with a core each, 2 lanes, beside DDP
python benchmarks/lightning_overhead.py --gpu      # one worker on a GPU, 1 and 8 lanes, beside one device

All jobs live at once and wait for their turn, a few steps long, so that what else a machine does meets all of
them. A ratio is that of two turns in a row.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measure import make_parser, make_record
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep.models import build
from lockstep.spec.record import Record, write_records

WARM_TURNS, LIMIT = 2, 1.10
# name → (samples in a batch, steps in a turn) on a CPU and on a GPU
CASES = {"classifier": {"cpu": (48, 40), "gpu": (1024, 30)}, "resnet18": {"cpu": (32, 2), "gpu": (1024, 10)}}


def main() -> None:
    parser = make_parser(__doc__, None)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--job", help="what this process is: a case and a strategy", default="")
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    if options.job:
        fit(options.folder, options.gpu, *options.job.split(":"))
        return
    records = [record for case in CASES for record in compare(case, options.gpu, options.rounds)]
    for record in records:
        print(f"{record.name}: {record.value:.3f} {record.spread} {record.details}")
    name = "lightning-gpu.json" if options.gpu else "lightning-cpu.json"
    write_records(options.output or Path(__file__).parent / "results" / name, records)


def compare(case: str, gpu: bool, rounds: int) -> list[Record]:
    """The times of all strategies of a case, turn by turn."""
    jobs = ["plain", "lanes1", "lanes8"] if gpu else ["plain", "lanes2"]
    times: dict[str, list[float]] = {job: [] for job in jobs}
    with tempfile.TemporaryDirectory() as text, ExitStack() as stack:
        folder = Path(text)
        for job in jobs:
            command = [sys.executable, __file__, "--job", f"{case}:{job}", "--folder", text]
            log = stack.enter_context((folder / f"{job}.log").open("wb"))
            process = subprocess.Popen(command + ["--gpu"] * gpu, stdout=log, stderr=log)
            stack.callback(process.wait)
        stack.callback(give_turn, folder, "end")
        for number in range(rounds + WARM_TURNS):
            for job in jobs[:: 1 if number % 2 else -1]:
                seconds = take_turn(folder, job, number)
                if number >= WARM_TURNS:
                    times[job].append(seconds)
    batch, steps = CASES[case]["gpu" if gpu else "cpu"]
    details = {f"{job} ms a step": round(1e3 * statistics.median(ts) / steps, 3) for job, ts in times.items()}
    other = "one device" if gpu else "DDP"
    place = "one worker on a GPU" if gpu else "2 workers, a core each"
    return [
        make_record(
            f"Lightning with {job.removeprefix('lanes')} lanes over {other}, {case}, batch {batch}, {place}",
            [mine / theirs for mine, theirs in zip(times[job], times["plain"], strict=True)],
            "x",
            limit=None if gpu else LIMIT,
            steps_in_a_turn=steps,
            **details,
        )
        for job in jobs[1:]
    ]


def give_turn(folder: Path, turn: str) -> None:
    """Tell all jobs whose turn it is; after "end" they are over."""
    (folder / "turn.new").write_text(turn)
    (folder / "turn.new").rename(folder / "turn")


def take_turn(folder: Path, job: str, number: int) -> float:
    """Let a job run its turn; gives the seconds that it took."""
    told = folder / f"{job}-{number}"
    give_turn(folder, f"{job} {number}")
    end = time.monotonic() + 120
    while not told.exists():
        if time.monotonic() > end:
            raise SystemExit(f"{job} does not answer: {(folder / f'{job}.log').read_text()[-2000:]}")
        time.sleep(0.002)
    return float(told.read_text())


def fit(folder: Path, gpu: bool, case: str, job: str) -> None:
    """One job: fits until the turns end."""
    import lightning.pytorch as pl
    from lightning.pytorch.plugins.environments import LightningEnvironment
    from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

    from lockstep.lightning import LaneStrategy

    batch, steps = CASES[case]["gpu" if gpu else "cpu"]
    workers = 1 if gpu else 2

    class Turns(pl.Callback):
        """Waits for turns and tells how long each took."""

        number, started = 0, 0.0

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step % steps == 0:
                while (turn := (folder / "turn").read_text()) != f"{job} {self.number}":
                    if turn == "end":
                        os._exit(0)
                    time.sleep(0.002)
                self.started = time.perf_counter()

        def on_train_batch_end(self, trainer: Any, *given: Any) -> None:
            if trainer.global_step % steps == 0:
                if gpu:
                    torch.cuda.synchronize()
                seconds, self.number = time.perf_counter() - self.started, self.number + 1
                if trainer.is_global_zero:
                    told = folder / f"{job}-{self.number - 1}"
                    told.with_suffix(".new").write_text(json.dumps(seconds))
                    told.with_suffix(".new").rename(told)

    class Net(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_net(case)

        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            images, labels = batch
            loss = F.cross_entropy(self.net(images), labels)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)

    strategy: Any = LaneStrategy(int(job.removeprefix("lanes")), tf32=gpu) if job != "plain" else None
    if job == "plain":
        environment = LightningEnvironment()
        strategy = SingleDeviceStrategy("cuda:0") if gpu else DDPStrategy(cluster_environment=environment)
        batch //= workers
    pl.seed_everything(0, verbose=False)
    size = (1, 16, 16) if case == "classifier" else (3, 32, 32)
    data = TensorDataset(torch.randn(4096, *size), torch.arange(4096) % 4)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(
        accelerator="gpu" if gpu else "cpu",
        devices=workers,
        strategy=strategy,
        max_epochs=-1,
        callbacks=[Turns()],
        enable_model_summary=False,
        **quiet,  # type: ignore[arg-type]
    )
    trainer.fit(Net(), DataLoader(data, batch, shuffle=True, drop_last=True))


def make_net(case: str) -> nn.Module:
    if case == "resnet18":
        return build("resnet18", in_channels=3, num_classes=4, image_size=(32, 32))
    features = nn.Conv2d(1, 12, 3), nn.BatchNorm2d(12), nn.ReLU(), nn.MaxPool2d(2)
    return nn.Sequential(*features, nn.Flatten(), nn.Dropout(0.2), nn.Linear(12 * 49, 4))


if __name__ == "__main__":
    main()
