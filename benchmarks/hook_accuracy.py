"""Accuracy of a recipe with compressed gradients, beside PyTorch's DDP with its hooks, over the same seeds.

python benchmarks/hook_accuracy.py fashion --seeds 5 -o data.dir=DIR
python benchmarks/hook_accuracy.py mnist --seeds 5 -o data.name=fashion -o data.dir=DIR    on CPUs

All train with four lanes. Lockstep trains them in one worker: four give the same bits. DDP needs four
processes, over gloo, since NCCL takes no two of them on one GPU; there they are slower than on CPUs. They get
the lanes' images from Lockstep's loader in its order, and the recipe's optimizer from PyTorch. Bytes are what
each of four workers sends in a step: what travels of all gradients, times 2 · 3/4.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ddp_peer import HOOKS, START, make_ddp, sent_bytes
from many_runs import ManyRuns
from measure import RESULTS, make_parser, make_record

import lockstep
from lockstep.cli.train import resolve
from lockstep.comm.group import Group
from lockstep.data.loader import TrainLoader
from lockstep.kernels.loss import heads_loss
from lockstep.kernels.numerics import half_precision, half_type, plain_torch, prepare_device
from lockstep.models import build_model
from lockstep.planner.compress.parcel import Sender
from lockstep.spec import Kernels, Run
from lockstep.spec.profile import WeightShape
from lockstep.spec.record import write_records
from lockstep.spec.rule.compression import read_compression
from lockstep.train.setup import set_up

SCHEMES = ("none", "bf16", "fp8", "int8", "top:0.01", "rank:4")
WORKERS = 4


def main() -> None:
    parser = make_parser(__doc__, None)
    parser.add_argument("recipe")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=max((os.cpu_count() or 2) // 2, 1), help="side by side")
    parser.add_argument("--schemes", nargs="+", default=[*SCHEMES, *HOOKS])
    parser.add_argument("-o", "--override", action="append", default=[])
    parser.add_argument("--work", help=argparse.SUPPRESS)  # of a process of a peer
    options = parser.parse_args()
    if options.work:
        return print(json.dumps(train_here(options, **json.loads(options.work))), flush=True)
    peers = [scheme for scheme in options.schemes if scheme in HOOKS]
    found = train_own(options, [scheme for scheme in options.schemes if scheme not in HOOKS])
    with ThreadPoolExecutor(len(HOOKS)) as pool:  # each has as many processes as there are workers
        found |= dict(zip(peers, pool.map(train_apart, peers), strict=True))
    records = make_records(options, found)
    write_records(options.output or RESULTS / "hook-accuracy.json", records)


def train_own(options: argparse.Namespace, schemes: Sequence[str]) -> dict[str, list[float]]:
    """Percents of our runs by scheme, in the order of seeds."""
    keys = {
        scheme: [(options.recipe, *settings(options, seed, scheme)) for seed in range(options.seeds)]
        for scheme in schemes
    }
    with (
        tempfile.TemporaryDirectory() as folder,
        ManyRuns(Path(folder, "kept"), options.jobs, float("inf")) as runs,
    ):
        runs.train(key for row in keys.values() for key in row)
        return {scheme: [100 * each for each in runs.known(row, "accuracy")] for scheme, row in keys.items()}


def make_records(options: argparse.Namespace, found: dict[str, list[float]]) -> list[Any]:
    """Test accuracy by scheme, and the bytes of a step."""
    run = find_run(options)
    shapes, records = weight_shapes(run), []
    plain = sent_bytes(shapes, HOOKS[0], WORKERS)
    for scheme in options.schemes:
        sent = (sent_bytes if scheme in HOOKS else own_bytes)(shapes, scheme, WORKERS)
        average, each = statistics.mean(found[scheme]), found[scheme]
        details = {"average": average, "each": each, "sent_mb_step": sent / 1e6, "fewer_bytes": plain / sent}
        if scheme == HOOKS[-1]:
            details["from_step"] = START
        what = f"{run.model.name} on {run.data.name}"
        name = f"{what}, {WORKERS} lanes, {scheme}: test accuracy after {run.train.epochs} epochs"
        records.append(make_record(name, each, "%", **details, precision=run.train.precision))
        print(f"{name}: {average:.2f} % {records[-1].spread}, {plain / sent:.1f} times fewer bytes")
    return records


def weight_shapes(run: Run) -> list[tuple[int, ...]]:
    """The shapes of a model's weights."""
    store = set_up(run, torch.device("cpu")).store
    return [tuple(p.shape) for p in build_model(run, store.shape, len(store.classes)).parameters()]


def own_bytes(shapes: Sequence[tuple[int, ...]], scheme: str, workers: int) -> float:
    """What workers with one lane each send of gradients, their mean; but for a few numbers."""
    weights = [WeightShape(str(place), shape) for place, shape in enumerate(shapes)]
    parcels = Sender(workers, workers, read_compression(scheme)).parcels(weights)
    return sum(sum(parcel.sent) for parcel in parcels) / workers


def train_apart(hook: str) -> list[float]:
    """Percents of a hook, in the order of seeds, trained by as many processes as there are workers."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    tasks = [json.dumps({"hook": hook, "rank": rank, "port": port}) for rank in range(WORKERS)]
    commands = [[sys.executable, __file__, *sys.argv[1:], "--work", task] for task in tasks]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    texts = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise SystemExit("a process failed: see the error above")
    found: list[float] = json.loads(texts[0].splitlines()[-1])
    return found


def train_here(options: argparse.Namespace, hook: str, rank: int, port: int) -> list[float]:
    """One worker of a hook's runs."""
    store = dist.TCPStore("127.0.0.1", port, WORKERS, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORKERS)
    with plain_torch():
        device = prepare_device("auto", 1)
        torch.set_deterministic_debug_mode("default")  # as PyTorch is used
        found = [train_peer(find_run(options, seed), hook, rank, device) for seed in range(options.seeds)]
    dist.destroy_process_group()
    return found


def settings(options: argparse.Namespace, seed: int = 0, scheme: str = "none") -> list[str]:
    """What is set over the recipe."""
    own = (f"train.lanes={WORKERS}", f"train.compress={scheme}", f"seed={seed}")
    return [*options.override, *own]


def find_run(options: argparse.Namespace, seed: int = 0) -> Run:
    """The run of a seed, without compression."""
    words = argparse.Namespace(recipe=options.recipe, config=None, override=settings(options, seed))
    return resolve(words, lockstep.Launch(quiet=True))[0]


def train_peer(run: Run, hook: str, rank: int, device: torch.device) -> float:
    """Percent of a run by DDP; this is one of its workers."""
    assert run.optimizer.name in {"nag", "momentum"}, "PyTorch's SGD has these two"
    setup = set_up(replace(run, kernels=Kernels("stock")), device)
    torch.manual_seed(WORKERS * run.seed + rank)  # of dropout
    loader = TrainLoader(
        setup.store.train,
        setup.augment(),
        batch=run.train.batch,
        lanes=WORKERS,
        own=range(rank, rank + 1),
        device=device,
        memory_format=setup.memory_format,
    )
    model, epochs, steps = make_ddp(setup.model, hook), run.train.epochs, len(loader)
    optimizer = torch.optim.SGD(
        model.parameters(),
        run.optimizer.lr,
        momentum=run.optimizer.options["momentum"],
        weight_decay=run.optimizer.weight_decay,
        nesterov=run.optimizer.name == "nag",
    )
    for epoch in range(epochs):
        model.train()
        for number, lanes in enumerate(loader.epoch(epoch)):
            done, base = epoch * steps + number, run.rate_factor * run.optimizer.lr
            optimizer.param_groups[0]["lr"] = run.schedule.rate(base, done, epochs * steps, steps)
            optimizer.zero_grad()
            with half_precision(device, half_type(run.train.precision)):
                outputs = model(lanes.images)
            heads_loss(setup.loss, outputs, lanes.labels, getattr(setup.model, "aux_weight", 0.0)).backward()
            optimizer.step()
    return 100 * (setup.stock_evaluator(Group())(setup.model).accuracy or 0.0)


if __name__ == "__main__":
    main()
