"""AlexNet with fully connected layers by channel beside data parallelism: bytes, and the exchange alone.

python benchmarks/channel_bytes.py

224 × 224 images, a batch of 256, 4 workers. First a real step under each plan, whose messages are noted by a
transport that records them: bytes that a worker sends, beside the formula, and the seconds that it computes.
Then the same messages without any computing, between network namespaces with links of 1 Gb/s.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from channel_exchange import BATCH, LANES, LAYERS, WORKERS, formula_bytes
from measure import make_parser, make_record
from shaped_link import inside, shaped_nodes
from torch import Tensor

import lockstep
from lockstep.comm.group import Group
from lockstep.models.alexnet import AlexNet
from lockstep.spec.record import Record, write_records

SMALLER, FASTER = 1 / 5, 4.0  # what is asked for: of the bytes, and of the exchange's time
PLANS = {"data": f"data={WORKERS}", "mix": f"data={WORKERS},layers={'/'.join(LAYERS)}"}
FOLDER, PLAN = "CHANNEL_FOLDER", "CHANNEL_PLAN"  # what a worker reads from its environment
RATE = "1gbit"


def main() -> None:
    parser = make_parser(__doc__, "channel-bytes-cpu.json")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    records = count_bytes()
    records.append(time_exchange(options.rounds))
    write_records(options.output, records)


def count_bytes() -> list[Record]:
    """What a worker sends in a real step of each plan, and the ratio; how long it computes."""
    found = {name: real_steps(plan) for name, plan in PLANS.items()}
    records = []
    for name, rows in found.items():
        sent = [row["gradient_bytes"] + row["layer_bytes"] for row in rows]
        formula = [formula_bytes(rank, name == "mix") for rank in range(WORKERS)]
        details = {"formula_mb": [round(n / 1e6, 6) for n in formula], "equal": sent == formula}
        details["gradients_mb"] = [row["gradient_bytes"] / 1e6 for row in rows]
        details["layers_mb"] = [row["layer_bytes"] / 1e6 for row in rows]
        details["messages_besides_kb"] = [row["other_bytes"] / 1e3 for row in rows]
        title = f"AlexNet 224, batch {BATCH}, {PLANS[name]}: sent by a worker in a step"
        records.append(make_record(title, [n / 1e6 for n in sent], "MB", **details))
        title = f"AlexNet 224, batch {BATCH}, {PLANS[name]}: compute of a worker in a step, on one host"
        seconds = [row["step_s"] - row["exchange_s"] for row in rows]
        records.append(make_record(title, seconds, "s", step_s=[row["step_s"] for row in rows]))
    ratio = records[2].value / records[0].value
    title = f"AlexNet 224, batch {BATCH}, {WORKERS} workers: bytes by channel over bytes by data"
    records.append(make_record(title, [ratio], "x", limit=SMALLER))
    for record in records:
        print(f"{record.name}: {record.value:.4f} {record.unit} {json.dumps(record.details)}", flush=True)
    return records


def real_steps(plan: str) -> list[dict[str, Any]]:
    """What each worker noted of a step under a plan, by rank."""
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, FOLDER: folder, PLAN: plan}
        subprocess.run([sys.executable, __file__], check=True, env=env)
        return [json.loads(Path(folder, f"worker-{rank}").read_text()) for rank in range(WORKERS)]


def time_exchange(rounds: int) -> Record:
    """The exchange of a step under both plans, one after the other, over shaped links."""
    script = str(Path(__file__).with_name("channel_exchange.py"))
    with shaped_nodes(WORKERS, RATE) as nodes:
        jobs = [
            subprocess.Popen(
                inside(name, [sys.executable, script, str(rank), str(rounds)]),
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank, name in enumerate(nodes.names)
        ]
        outputs = [job.communicate()[0] for job in jobs]
    times: dict[str, list[float]] = json.loads(outputs[0].splitlines()[-1])
    ratios = [by_data / mixed for by_data, mixed in zip(times["data"], times["mix"], strict=True)]
    rates = {
        f"{name}_gb_s": [round(8e-9 * formula_bytes(0, name == "mix") / s, 3) for s in seconds]
        for name, seconds in times.items()
    }
    title = f"AlexNet 224, batch {BATCH}, {WORKERS} nodes, links of {RATE}: exchange by data over by channel"
    record = make_record(title, ratios, "x", limit=FASTER, seconds=times, **rates)
    print(f"{record.name}: {record.value:.2f} {record.spread} {json.dumps(record.details)}", flush=True)
    return record


class Images:
    """Random images of 1000 classes, the same in every process."""

    classes = tuple(map(str, range(1000)))

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(i)
        return torch.rand(3, 224, 224, generator=generator), i * 3


def work() -> None:
    """In a worker: train one step, and note what it sent and how long it took."""
    import importlib

    from lockstep.comm.recorded.recording_transport import record_group
    from lockstep.elastic.worker_groups import WorkerGroups

    folder, step = Path(os.environ[FOLDER]), importlib.import_module("lockstep.train.step").Step
    join, call, send, spent = WorkerGroups.next, step.__call__, Group._try, [0.0]

    def send_and_time(self: Group, *given: Any) -> None:
        start = time.perf_counter()
        send(self, *given)
        spent[0] += time.perf_counter() - start

    def record_next(self: WorkerGroups) -> Any:
        group = join(self)
        record_group(group, folder / "calls")
        return group

    def call_and_note(self: Any, lanes: Any, *requests: bool) -> Any:
        world = self._mesh.world
        log = folder / "calls" / f"{world.rank}.jsonl"
        world.barrier()
        before, start, spent[0] = len(log.read_text().splitlines()), time.perf_counter(), 0.0
        result = call(self, lanes, *requests)
        row = {"step_s": time.perf_counter() - start, "exchange_s": spent[0]}
        row |= count_calls([json.loads(line) for line in log.read_text().splitlines()[before:]])
        Path(folder, f"worker-{world.rank}").write_text(json.dumps(row))
        return result

    WorkerGroups.next, step.__call__ = record_next, call_and_note  # type: ignore[method-assign]
    Group._try = send_and_time  # type: ignore[method-assign]
    torch.manual_seed(0)
    train = lockstep.Train(epochs=1, batch=BATCH, lanes=LANES, slices=WORKERS)
    optimizer = lockstep.Optimizer(name="sgd", lr=0.01)
    launch = lockstep.Launch(
        name="run", runs_dir=folder, device="cpu", plan=os.environ[PLAN], quiet=True, overlap=False
    )
    model = AlexNet(3, 1000, (224, 224))
    data = Images(BATCH), Images(2)
    lockstep.train(lockstep.Run(train=train, optimizer=optimizer), model, data, launch=launch)


def count_calls(calls: list[Any]) -> dict[str, float]:
    """The bytes that a worker sent for gradients, for split layers, and besides."""
    found = {"gradient_bytes": 0, "layer_bytes": 0, "other_bytes": 0}
    for row in calls:
        if isinstance(row, int):  # a call has ended
            continue
        kind = {"swap": "gradient_bytes", "all_to_all": "layer_bytes"}.get(row["operation"], "other_bytes")
        found[kind] += sum(row["sent"]) if row["sent"] else row["num_bytes"] * (len(row["members"]) - 1)
    return dict(found)


if __name__ == "__main__":
    work() if FOLDER in os.environ else main()
