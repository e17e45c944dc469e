"""Which kernels a training step on a GPU spends its time in: this engine's beside those of torch.compile.

python benchmarks/step_kernels.py --model timm:convnext_atto --batch 256 --lanes 1
python benchmarks/step_kernels.py --model timm:regnety_004 --lanes 1,8 --variants lockstep --most 60

Each variant is a process of its own; what compiles does so in all of them at once. Then they take turns, and
torch's profiler watches some steps. A record is the microseconds of one step in all kernels; its details have
those of each kernel, the longest first, and how often a step starts it.
"""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from gpu_step import OURS, make_case, split
from measure import make_parser, make_record
from rich.console import Console
from rich.table import Table

from lockstep.spec.record import Record, write_records

WARM, WATCHED = 32, 32  # steps
ONE = "--one"  # a variant in this process


def main() -> None:
    parser = make_parser(__doc__, "step-kernels.json")
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--precision", choices=("bf16", "tf32", "fp32"), default="bf16")
    parser.add_argument("--lanes", type=split, default=["1"], help="of this engine, perhaps several")
    parser.add_argument(
        "--variants", default=f"{OURS}; compile, graph", help="separated by ; as those of gpu_step.py"
    )
    parser.add_argument("--most", type=int, default=25, help="kernels that are shown")
    options = parser.parse_args()
    jobs = [
        (variant, int(lanes))
        for variant in (word.strip() for word in options.variants.split(";"))
        for lanes in (options.lanes if variant == OURS else ["1"])
    ]
    records = []
    with tempfile.NamedTemporaryFile() as lock, ExitStack() as running:
        fcntl.flock(lock, fcntl.LOCK_EX)
        common = [options.model, options.batch, options.precision, lock.name]
        processes = [start([*common, *job]) for job in jobs]
        running.callback(lambda: [process.kill() for process in processes])
        for process in processes:
            read(process)  # it has compiled
        fcntl.flock(lock, fcntl.LOCK_UN)
        for (variant, lanes), process in zip(jobs, processes, strict=True):
            kernels = read(process)
            name = f"{options.model} B={options.batch} {options.precision}: {variant}"
            name += f", {lanes} lane{'s' * (lanes > 1)}" if variant == OURS else ""
            total = sum(us for _, us, _ in kernels)
            records.append(make_record(name, [total], "us", steps=WATCHED, kernels=kernels))
            show(records[-1], options.most)
    write_records(options.output, records)


def start(job: list[Any]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, __file__, ONE, json.dumps(job)], stdout=subprocess.PIPE, text=True
    )


def read(process: subprocess.Popen[str]) -> list[tuple[str, float, float]]:
    """The next list that a process tells; what else is printed there is passed over."""
    assert process.stdout
    for line in process.stdout:
        if line.startswith("["):
            return [(name, us, count) for name, us, count in json.loads(line)]
    raise SystemExit(f"a variant ended with {process.wait()}: its reason is above")


def watch(model: str, batch: int, precision: str, lock: str, variant: str, lanes: int) -> None:
    """Print the kernels of a variant: name, microseconds of a step, how often a step starts it."""
    import torch

    case = make_case(model, batch, precision)
    if variant == OURS:
        from own_step import lockstep_step

        step = lockstep_step(case, lanes)
    else:
        from peers import PEERS

        step = PEERS[variant](case, "cuda")
    step()
    torch.cuda.synchronize()
    print("[]", flush=True)
    with Path(lock).open("rb") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        for _ in range(WARM):
            step()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(WATCHED):
                step()
            torch.cuda.synchronize()
    us, count = Counter[str](), Counter[str]()
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            us[event.name] += event.device_time_total
            count[event.name] += 1
    rows = [
        (name, round(time / WATCHED, 2), round(count[name] / WATCHED, 3)) for name, time in us.most_common()
    ]
    print(json.dumps(rows))


def show(record: Record, most: int) -> None:
    table = Table(title=f"{record.name}: {record.value:,.0f} µs a step", title_justify="left")
    for title in ("µs", "starts", "kernel"):
        table.add_column(title, justify="left" if title == "kernel" else "right", no_wrap=True)
    for name, us, count in record.details["kernels"][:most]:
        table.add_row(f"{us:,.1f}", f"{count:g}", name[:90])
    Console(width=120).print(table)


if __name__ == "__main__":
    if ONE in sys.argv:
        watch(*json.loads(sys.argv[2]))
    else:
        main()
