"""A model's gradients exchanged over slow links, as they are and compressed; nothing is computed beside.

python benchmarks/compressed_exchange.py --model alexnet --rate 1gbit --workers 4 --rounds 5

Every worker is in a network namespace of its own, whose link has this rate, and has one lane. Its time begins
with the gradients and ends with their means, and with what was left out remembered. `cpu_s` is told apart:
what all workers' processes computed for one exchange, codecs and network together, on the cores that they
share. Needs root and iproute2.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measure import make_parser, make_record
from reduction import slowest
from shaped_link import address, inside, shaped_nodes

from lockstep.comm.bucket import ReducedTensor
from lockstep.comm.compress.codec_library import compresses_by
from lockstep.comm.compress.feedback import Feedback
from lockstep.comm.group import Group
from lockstep.comm.reducer import Reducer
from lockstep.comm.transport import TorchTransport
from lockstep.models import build_model
from lockstep.spec import Model, Run
from lockstep.spec.record import read_records, write_records
from lockstep.spec.rule.compression import read_compression

SCHEMES, PORT = ("bf16", "int8", "fp8", "top:0.01", "rank:4"), 29633
SHAPES = {"alexnet": (3, 224, 224), "googlenet": (3, 224, 224), "resnet18": (3, 224, 224)}


def main() -> None:
    parser = make_parser(__doc__, "compressed-exchange-cpu.json")
    parser.add_argument("--model", choices=SHAPES, default="alexnet")
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--schemes", nargs="+", default=SCHEMES, help="beside none")
    options = parser.parse_args()
    words = [str(Path(__file__).absolute()), options.model, str(options.workers), str(options.rounds)]
    words += ["none", *(scheme for scheme in options.schemes if scheme != "none")]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "EXCHANGE_RANK": ""}
    with shaped_nodes(options.workers, options.rate) as nodes:
        started = [
            subprocess.Popen(
                inside(node, [sys.executable, *words]),
                env={**env, "EXCHANGE_RANK": str(rank)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank, node in enumerate(nodes)
        ]
        texts = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise SystemExit("a worker failed")
    found = json.loads(texts[0].splitlines()[-1])
    title = f"{options.model}, {options.workers} workers, {options.rate}"
    plain = statistics.median(found["none"]["exchange"])
    records = [
        make_record(
            f"exchange of {title}: {scheme}",
            row["exchange"],
            "s",
            sent_mb=row["sent_mb"],
            cpu_s=round(statistics.median(row["cpu"]), 3),
            codecs=row["codecs"],
            cores=os.cpu_count(),
            times_faster=round(plain / statistics.median(row["exchange"]), 3),
        )
        for scheme, row in found.items()
    ]
    for record in records:
        print(f"{record.name}: {record.value:.3f} s {json.dumps(record.details)}")
    before = read_records(options.output) if options.output.exists() else []
    names = {record.name for record in records}
    write_records(options.output, [*(each for each in before if each.name not in names), *records])


def work(rank: int, name: str, workers: int, rounds: int, schemes: list[str]) -> None:
    """One worker; worker 0 prints what was found."""
    torch.set_num_threads(1)
    wait = timedelta(minutes=5)
    store = dist.TCPStore(address(0), PORT, workers, is_master=rank == 0, timeout=wait)
    group = Group(rank, workers, TorchTransport("gloo", store, rank, workers, address(rank)))
    model = build_model(Run(model=Model(name=name)), SHAPES[name], 1000)
    params = {n: p.detach() for n, p in model.named_parameters()}
    maker = torch.Generator().manual_seed(rank)
    grads = [torch.randn(p.shape, generator=maker) * 1e-3 for p in params.values()][::-1]
    entries = [ReducedTensor(p, None, n) for n, p in reversed(params.items())]
    found: dict[str, dict[str, Any]] = {}
    for scheme in schemes:  # one after another: together they would not fit into memory
        compression = read_compression(scheme)
        feedback = Feedback(compression, params, workers, group) if compression else None
        reducer = Reducer(group, workers, entries, overlap=False, feedback=feedback)
        seconds, cpu = list[float](), list[float]()
        for _ in range(rounds + 1):
            before = time.process_time()
            seconds.append(slowest(group, partial(exchange, reducer, grads)))
            cpu.append(sum(json.loads(each) for each in group.all_gather_bytes(spent(before))))
        sent = group.all_gather_bytes(json.dumps(reducer.sent_bytes).encode())
        found[scheme] = {
            "exchange": seconds[1:],  # not the first, in which memory is touched
            "cpu": cpu[1:],
            "codecs": compresses_by(torch.device("cpu")) if compression else "none",
            "sent_mb": round(max(map(json.loads, sent)) / 1e6, 3),
        }
        reducer.close()
    if rank == 0:
        print(json.dumps(found), flush=True)
    group.close()


def exchange(reducer: Reducer, grads: list[torch.Tensor]) -> None:
    """From the gradients to their means, committed."""
    reducer.begin()
    reducer.add(grads)
    reducer.finish()
    reducer.commit()


def spent(before: float) -> bytes:
    """The CPU seconds of this process since then."""
    return json.dumps(time.process_time() - before).encode()


if __name__ == "__main__":
    if os.environ.get("EXCHANGE_RANK"):
        work(int(os.environ["EXCHANGE_RANK"]), sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
    else:
        main()
