"""Measures a machine as training will use it: probe → Cluster.

All workers of a machine call `probe_machine`; what one worker measures alone, worker 0 does while the others
wait. Nothing is trained.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

import torch

from lockstep.comm.group import Group
from lockstep.measure.probe_codec import measure_codecs
from lockstep.measure.probe_device import (
    Figure,
    find_memory,
    measure_copy,
    measure_products,
    measure_start,
    name_device,
)
from lockstep.measure.probe_exchange import Exchanges, fit_link, measure_exchanges
from lockstep.measure.probe_feed import measure_decoding, measure_disk
from lockstep.measure.probe_workers import Slowdown, measure_slowdown
from lockstep.spec.cluster import (
    Cluster,
    CodecTime,
    ExchangeTimes,
    FeedRate,
    LinkRate,
    NodeShape,
    WorkerSpeed,
)

_LARGEST = 32 << 20
_BUSY = 0.7  # a load average with which a core is not free
_DIGITS = 4  # that a file shows of each figure


@dataclass(frozen=True)
class Effort:
    """How long each part may take, and how many sizes of exchanges are tried."""

    device_s: float
    slowdown_s: float
    exchange_s: float
    growth: int  # from one size of exchanges to the next
    disk_bytes: int
    codec_side: int = 2048  # of the matrix whose gradient is compressed

    @property
    def sizes(self) -> list[int]:
        """From 4 KiB to 32 MiB."""
        found = [4096]
        while found[-1] * self.growth < _LARGEST:
            found.append(found[-1] * self.growth)
        return [*found, _LARGEST]


FULL = Effort(device_s=8.0, slowdown_s=8.0, exchange_s=16.0, growth=2, disk_bytes=128 << 20)
QUICK = Effort(device_s=1.0, slowdown_s=0.8, exchange_s=1.0, growth=16, disk_bytes=16 << 20, codec_side=512)


@dataclass(frozen=True)
class Machine:
    """What is probed: this worker's device, a folder of the disk, and a call that decodes one image."""

    device: torch.device
    folder: Path
    decode: Callable[[], object]


def probe_machine(
    group: Group, machine: Machine, effort: Effort, tell: Callable[[str], None]
) -> Cluster | None:
    """The machine of this group's workers; None for all but worker 0, which tells what it does."""
    is_first, busy, codecs = group.rank == 0, os.getloadavg()[0], None
    say = tell if is_first else _say_nothing
    if busy > _BUSY:
        say(f"load average {busy:.1f}: other processes compute here, so figures will be worse than its own")
    device, alone = machine.device, _alone(machine, effort, say) if is_first else {}
    if is_first:
        say("codecs of gradients")
        codecs = measure_codecs(device, effort.codec_side, 0.2 * effort.device_s)
    group.barrier()
    say("computing side by side" if group.size > 1 else "computing")
    slowdown = measure_slowdown(group, device, effort.slowdown_s)
    exchanges = Exchanges((), "none: one worker")
    if group.size > 1:
        exchanges = measure_exchanges(group, device, effort.sizes, effort.exchange_s, say)
    if not codecs:
        return None
    load = f"load average {busy:.1f} before it"
    found = _describe(machine, group.size, alone, slowdown, exchanges, load)
    rows = [
        CodecTime(row.scheme, *map(_short, (row.lane_ns, row.mean_ns, row.commit_ns))) for row in codecs.rows
    ]
    return replace(found, codec=tuple(rows), how={**found.how, "codec": codecs.how})


def _say_nothing(line: str) -> None:
    pass


def _alone(machine: Machine, effort: Effort, tell: Callable[[str], None]) -> dict[str, Figure]:
    """What worker 0 measures by itself, by the name of the figure in the file."""
    device, budget_s = machine.device, effort.device_s
    tell(f"products on {name_device(device)}")
    products = measure_products(device, 0.5 * budget_s)
    found = {f"worker.gflop_s.{name}": figure for name, figure in products.items()}
    tell("memory")
    found["worker.memory_gb_s"] = measure_copy(device, 0.2 * budget_s)
    found["worker.launch_us"] = measure_start(device, 0.1 * budget_s)
    tell("disk")
    found["feed.disk_mb_s"] = measure_disk(machine.folder, effort.disk_bytes)
    tell("decoding")
    found["feed.decode_img_s"] = measure_decoding(machine.decode, 0.2 * budget_s)
    return found


def _describe(
    machine: Machine,
    workers: int,
    alone: dict[str, Figure],
    slowdown: Slowdown,
    exchanges: Exchanges,
    load: str,
) -> Cluster:
    device, prefix = machine.device, "worker.gflop_s."
    memory = find_memory(device, workers)
    how = {name: figure.how for name, figure in alone.items()}
    how |= {"worker.memory_gb": memory.how, "worker.slowdown": slowdown.how, "exchange": exchanges.how}
    link = None
    if exchanges.rows:
        sends = next(row for row in exchanges.rows if row.kind == "send")
        link, error = fit_link(sends)
        how["node.link"] = error.how
    how["probe"] = f"lockstep probe, {date.today()}, torch {torch.__version__}, {load}"
    value = {name: _short(figure.value) for name, figure in alone.items()}
    name = name_device(device)
    return Cluster(
        name=f"{workers}x {name}",
        worker=WorkerSpeed(
            kind="gpu" if device.type == "cuda" else "cpu",
            device=name,
            memory_gb=_short(memory.value),
            memory_gb_s=value["worker.memory_gb_s"],
            gflop_s={key.removeprefix(prefix): each for key, each in value.items() if key.startswith(prefix)},
            launch_us=value["worker.launch_us"],
            slowdown=tuple(map(_short, slowdown.ratios)),
        ),
        node=NodeShape(workers, link and LinkRate(_short(link.latency_us), _short(link.gb_s))),
        feed=FeedRate(
            value["feed.disk_mb_s"], value["feed.decode_img_s"], cores=len(os.sched_getaffinity(0))
        ),
        exchange=tuple(
            ExchangeTimes(row.kind, row.workers, tuple(map(_short, row.mb)), tuple(map(_short, row.ms)))
            for row in exchanges.rows
        ),
        how=how,
    )


def _short(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
