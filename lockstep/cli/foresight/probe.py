"""`lockstep probe`: measures this machine and writes it as a cluster's file; shows clusters by name."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.cli.flag import add_device
from lockstep.elastic.job import Job
from lockstep.elastic.worker_command import WorkerCommand, own_command
from lockstep.errors import BadInput, SpecError

if TYPE_CHECKING:
    from lockstep.spec.cluster import Cluster

    Verbs = argparse._SubParsersAction[argparse.ArgumentParser]

_WORKER = "lockstep.cli.foresight.probe_worker"
_MOST_WORKERS = 1024
_TEXT = """\
Measure this machine, and write how fast it computes and how fast its workers talk:

  lockstep probe                          writes cluster.toml, in about half a minute
  lockstep probe --quick --workers 4      rougher, with four workers, in about 10 seconds

The file says of each figure how it was got, and may be edited: add a [network] for more machines like this
one. What runs beside it on the machine is measured too, so let it be idle. For machines that are not at hand:

  lockstep probe --list                   clusters that ship with Lockstep, by name
  lockstep probe --show 8xH100            one of them, to start a file of your own from
"""


def add_parser(verbs: Verbs) -> None:
    """Add the verb and its flags."""
    parser = verbs.add_parser(
        "probe",
        help="measure this machine, for predictions",
        description=_TEXT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("cluster.toml"),
        metavar="FILE.toml",
        help="must not exist yet; its folder's disk is measured; default: cluster.toml",
    )
    parser.add_argument(
        "--workers", type=int, metavar="N", help="processes that compute; default: one per GPU, else per core"
    )
    parser.add_argument("--quick", action="store_true", help="fewer sizes and rounds")
    add_device(parser)
    parser.add_argument("--list", action="store_true", help="print the clusters that ship with Lockstep")
    parser.add_argument("--show", metavar="NAME", help="print one of these as a file")
    parser.set_defaults(handler=run_probe)


def run_probe(options: argparse.Namespace) -> int:
    """Measure, or show what is known."""
    if options.list:
        return _print_presets()
    from lockstep.planner.preset import preset_text
    from lockstep.planner.remembered import remember_cluster
    from lockstep.spec.cluster_file import read_cluster, write_cluster

    if options.show:
        print(preset_text(options.show), end="")
        return 0
    output = options.output
    if output.exists():
        raise BadInput(f"--output {output} exists: give another name; nothing is overwritten")
    if not output.resolve().parent.is_dir():
        raise BadInput(f"--output {output}: there is no such folder; make it first")
    workers = _count_workers(options)
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "cluster.toml")
        code = _measure(result, options, workers)
        if code or not result.is_file():
            return code or 1
        cluster = read_cluster(result)
    with output.open("x", encoding="utf-8") as file:
        file.write(write_cluster(cluster))
    print(f"{output}: {_tell(cluster)}")
    if not options.quick:
        remember_cluster(cluster)
        print("kept as `--cluster here`; runs on this machine are predicted with it")
    return 0


def _count_workers(options: argparse.Namespace) -> int:
    """How many workers to start; an error if this machine cannot have so many."""
    gpus, wanted = 0, options.workers
    if options.device != "cpu":
        import torch

        gpus = torch.cuda.device_count()
    if options.device == "cuda" and not gpus:
        raise SpecError("--device cuda: torch sees no GPU here; use --device cpu or run `lockstep doctor`")
    if wanted is not None and not 1 <= wanted <= _MOST_WORKERS:
        raise BadInput(f"--workers {wanted} must be 1 to {_MOST_WORKERS}")
    if gpus and wanted and wanted > gpus:
        raise BadInput(f"--workers {wanted}: a worker needs a GPU of its own, and there are {gpus} here")
    return wanted or gpus or len(os.sched_getaffinity(0))


def _measure(result: Path, options: argparse.Namespace, workers: int) -> int:
    """Have the workers write `result`; returns their exit code."""
    folder = options.output.resolve().parent
    if workers == 1:
        from lockstep.cli.foresight.probe_worker import work

        work(result, options.device, options.quick, folder)
        return 0
    words = [str(result), options.device, "quick" if options.quick else "full", str(folder)]
    command = WorkerCommand(own_command().flags, _WORKER, [_WORKER, *words])
    job = Job(workers, workers, preload="lockstep.measure.probe", is_elastic=False, advice="")
    from lockstep.elastic.launcher import Launcher

    return Launcher(job, _say, command).run()


def _say(worker: str, line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _tell(cluster: Cluster) -> str:
    """A cluster in a line or two."""
    worker, link = cluster.worker, cluster.node.link
    rates = ", ".join(f"{name} {_flop(rate)}" for name, rate in worker.gflop_s.items())
    parts = [f"{cluster.node.workers} workers" if cluster.node.workers > 1 else "1 worker", worker.device]
    parts += [f"{rates} a worker", f"memory {worker.memory_gb_s:,.0f} GB/s"]
    if len(worker.slowdown) > 1:
        parts.append(f"{worker.slowdown[-1]:.2f} x as long while all compute")
    if link:
        parts.append(f"messages {link.latency_us:,.0f} us + {link.gb_s:,.2f} GB/s")
    parts.append(f"disk {cluster.feed.disk_mb_s:,.0f} MB/s")
    parts.append(f"decoding {cluster.feed.decode_img_s:,.0f} img/s a core")
    return "; ".join(parts)


def _print_presets() -> int:
    from lockstep.planner.preset import list_presets

    rows = [("name", "a worker is", "fp32", "bf16", "memory", "workers", "between", "network")]
    for name, cluster in list_presets().items():
        worker, node, network = cluster.worker, cluster.node, cluster.network
        half = worker.gflop_s.get("bf16")
        rows.append(
            (
                name,
                worker.device,
                _flop(worker.gflop_s["fp32"]),
                _flop(half) if half else "-",
                f"{worker.memory_gb:g} GB, {worker.memory_gb_s:,.0f} GB/s",
                str(node.workers),
                f"{node.link.gb_s:g} GB/s" if node.link else "-",
                f"{network.gb_s:g} GB/s" if network else "-",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
    print("\nfp32, bf16: of large products; `lockstep probe --show NAME` says where each figure is from")
    return 0


def _flop(gflop_s: float) -> str:
    return f"{gflop_s / 1000:,.1f} TFLOP/s" if gflop_s >= 1000 else f"{gflop_s:,.3g} GFLOP/s"
