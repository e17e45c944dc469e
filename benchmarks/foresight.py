"""Steps predicted from a probe and a profile of one worker, beside steps that were measured.

python benchmarks/foresight.py --cluster here.toml   two cores: models × plans of 1 and 2 workers
python benchmarks/foresight.py --device cuda         one GPU: models × three batch sizes

On a CPU each run trains 28 steps, of which the last 24 count. On a GPU a model is profiled at two batch
sizes, and three others are predicted and measured; the layers are not timed. What is compiled takes minutes,
so its batch sizes are compiled side by side in processes of their own, and measured one after another.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from measure import make_parser, make_record

import lockstep
from lockstep.kernels.numerics import plain_torch, prepare_device
from lockstep.measure.probe_device import name_device
from lockstep.planner.cost import predict
from lockstep.planner.deal_work import deal_work
from lockstep.spec import Data, Kernels, Launch, Model, Run, Train
from lockstep.spec.cluster import Cluster, NodeShape, WorkerSpeed
from lockstep.spec.cluster_file import read_cluster
from lockstep.spec.plan import read_plan
from lockstep.spec.profile import LanesTime, LayerProfile, LayerTime, Profile
from lockstep.spec.record import write_records
from lockstep.train.foresight.measured_profile import ProfileOptions, measure_profile
from lockstep.train.foresight.step_time import time_steps
from lockstep.train.setup import set_up

STEPS, FIRST = 28, 4
# model: size, batch, lanes
CPU = {"emotion48": (48, 64, 8), "alexnet": (127, 8, 4), "googlenet": (64, 4, 4), "resnet18": (32, 8, 4)}
PLANS = ["data=1", "data=2", "pipeline=2", "data=2,shard=optimizer", "data=2,shard=parameters"]
PLANS += ["channel=2", "spatial=2"]
GPU = {
    "emotion48": (48, 1, "fused", (512, 8192), (1024, 2048, 4096)),
    "resnet18": (32, 3, "fused", (512, 2048), (256, 1024, 4096)),
    "resnet50": (224, 3, "compiled", (96, 256), (64, 128, 192)),
    "alexnet": (224, 3, "compiled", (128, 512), (256, 384, 1024)),
    "googlenet": (224, 3, "compiled", (96, 256), (64, 128, 192)),
}


def main() -> None:
    parser = make_parser(__doc__, None)
    parser.add_argument("--cluster", type=Path, help="what `lockstep probe` wrote")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--models", nargs="+")
    parser.add_argument(
        "--time", nargs=2, metavar=("MODEL", "BATCH"), help="print seconds of steps; internal"
    )
    parser.add_argument("--plans", nargs="+", default=PLANS)
    options = parser.parse_args()
    if options.time:
        return time_on_gpu(options.time[0], int(options.time[1]))
    records: list[Any] = []
    if options.device == "cuda":
        for name in options.models or GPU:
            records += on_gpu(name)
            write_records(options.output, records)
        return
    cluster = read_cluster(options.cluster)
    for name in options.models or CPU:
        for record in on_cpu(name, cluster, options):
            records.append(record)
            write_records(options.output, records)


def make_run(model: str, size: int, channels: int, train: Train, steps: int = STEPS) -> Run:
    """The recipe `shapes` with another model and size."""
    count = {"num_train": steps * train.batch, "num_test": train.batch}
    data = Data(name="shapes", options={"size": size, "channels": channels, **count})
    return replace(lockstep.recipe("shapes"), model=Model(model), data=data, train=train)


def on_cpu(name: str, cluster: Cluster, options: Any) -> Iterator[Any]:
    """One model under every plan."""
    size, batch, lanes = CPU[name]
    train = Train(epochs=1, batch=batch, lanes=lanes)
    channels = 1 if name == "emotion48" else 3
    run, grid = (
        make_run(name, size, channels, replace(train, bands=bands, slices=bands)) for bands in (1, 2)
    )
    profiles: dict[bool, Profile] = {}
    for text in options.plans:
        plan = read_plan(text)
        cut = plan.splits_layers
        if cut not in profiles:
            parts = (("channel", 2), ("spatial", 2)) if cut else ()
            asked = ProfileOptions(steps=24, parts=parts)
            with plain_torch():
                profiles[cut] = measure_profile(grid if cut else run, Launch(device="cpu"), asked, print)
        plan = replace(plan, data=plan.data or 1)
        cost = predict(deal_work(grid if cut else run, profiles[cut], cluster, plan))
        times = measure_run(grid if cut else run, str(plan), plan.data * plan.least)
        found = statistics.median(times)
        error = cost.total_s / found - 1
        print(
            f"{name}, {plan}: predicted {cost.total_s:.4f} s, measured {found:.4f} s, {100 * error:+.1f} %",
            flush=True,
        )
        yield make_record(
            f"{name} at {size}, batch {batch} in {lanes} lanes, {plan}: seconds of a step",
            times,
            "s",
            predicted_s=cost.total_s,
            error_percent=round(100 * error, 2),
            parts={key: round(value, 6) for key, value in cost.parts().items()},
        )


def measure_run(run: Run, plan: str, workers: int) -> list[float]:
    """Seconds of the steps of a real run, but the first."""
    from lockstep.spec.run_file import dump_toml

    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "run.toml")
        config.write_text(dump_toml(run))
        words = ["-c", str(config), "--plan", plan, "--runs-dir", folder, "--name", "run", "--device", "cpu"]
        command = [
            sys.executable,
            "-m",
            "lockstep",
            "train",
            "shapes",
            *words,
            "--workers",
            str(workers),
            "--quiet",
        ]
        subprocess.run(command, check=True, env={**os.environ})
        rows = [
            json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
        ]
    return [run.train.batch / row["img_s"] for row in rows if row["kind"] == "step"][FIRST:]


def on_gpu(name: str) -> list[Any]:
    """One model at three batch sizes, from a profile at two others."""
    size, channels, kernels, known, asked = GPU[name]
    times = (
        time_together(name, (*known, *asked))
        if kernels == "compiled"
        else time_in_turn(name, (*known, *asked))
    )
    for batch, found in times.items():
        print(f"{name}, {batch}: {statistics.median(found):.5f} s", flush=True)
    rows = tuple(LanesTime(1, batch, statistics.median(times[batch])) for batch in known)
    place = name_device(torch.device("cuda", 0))
    whole = tuple(LayerTime(row.images, row.seconds / 3, row.seconds * 2 / 3) for row in rows)
    layers = (LayerProfile("model", "other", 0.0, 0, 0, 0, times=whole),)
    profile = Profile(name, (channels, size, size), 10, "bf16", kernels, layers, device=place, lanes=rows)
    cluster = Cluster("here", WorkerSpeed("gpu", place, 139, 4000, {"fp32": 5e4}), NodeShape(1))
    records = []
    for batch in asked:
        cost = predict(deal_work(gpu_run(name, batch), profile, cluster, read_plan("data=1")))
        error = cost.total_s / statistics.median(times[batch]) - 1
        print(f"{name}, batch {batch}: predicted {cost.total_s:.5f} s, {100 * error:+.1f} %", flush=True)
        records.append(
            make_record(
                f"{name} at {size}, batch {batch}, bf16, {kernels}: seconds of a step",
                list(times[batch]),
                "s",
                predicted_s=cost.total_s,
                error_percent=round(100 * error, 2),
                profiled_at=list(known),
            )
        )
    return records


def time_in_turn(name: str, batches: Sequence[int]) -> dict[int, list[float]]:
    """Seconds of 24 steps of each batch size."""
    with plain_torch():
        device, launch = prepare_device("cuda", 1), Launch(device="cuda")
        return {
            batch: list(time_steps(set_up(gpu_run(name, batch), device), launch, 24).each_s)
            for batch in batches
        }


def time_together(name: str, batches: Sequence[int]) -> dict[int, list[float]]:
    """The same, compiled at once."""
    command = [sys.executable, __file__, "--device", "cuda", "--time", name]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    workers = {batch: subprocess.Popen([*command, str(batch)], **pipes) for batch in batches}
    for worker in workers.values():
        assert worker.stdout and worker.stdout.readline() == "ready\n", f"{name}: see the error above"
    return {batch: json.loads(worker.communicate("now\n")[0]) for batch, worker in workers.items()}


def gpu_run(name: str, batch: int) -> Run:
    """A model of the table with one lane."""
    size, channels, kernels, *_ = GPU[name]
    train = Train(epochs=1, batch=batch, lanes=1, precision="bf16")
    return replace(make_run(name, size, channels, train, steps=4), kernels=Kernels(set=kernels))


def time_on_gpu(name: str, batch: int) -> None:
    """Say when compiled; when asked, time 24 steps and print them. One process of `time_together`."""
    with plain_torch():
        setup = set_up(gpu_run(name, batch), prepare_device("cuda", 1))
        time_steps(setup, Launch(device="cuda"), 2)
        print("ready", flush=True)
        sys.stdin.readline()
        print(json.dumps(time_steps(setup, Launch(device="cuda"), 24).each_s), flush=True)


if __name__ == "__main__":
    main()
