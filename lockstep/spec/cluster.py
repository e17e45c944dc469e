"""A Cluster: how fast machines compute and how fast they talk, as a file that one can read and edit.

probe → Cluster → planner → Plan. Every rate is of one worker: a GPU, or a core of a CPU. Workers beyond those
of a node are on further nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from lockstep.errors import SpecError, unknown
from lockstep.spec.field import accept_number
from lockstep.spec.rule.compression import read_compression

KINDS = ("cpu", "gpu")
EXCHANGES = ("reduce", "gather", "swap", "send")  # by the tree; to all; within a lane; to one


@dataclass(frozen=True)
class LinkRate:
    """What a worker sends another: seconds = latency + bytes / rate."""

    latency_us: float
    gb_s: float


@dataclass(frozen=True)
class WorkerSpeed:
    """One worker's device."""

    kind: str  # cpu or gpu
    device: str
    memory_gb: float
    memory_gb_s: float  # read and written
    gflop_s: Mapping[str, float]  # by precision, of a large product
    launch_us: float = 0.0  # to start one operation
    step_ms: float = 0.0  # of the host in every step
    slowdown: tuple[float, ...] = (1.0,)  # of computing, while 1, 2 … workers of a node compute


@dataclass(frozen=True)
class NodeShape:
    """Workers of one machine."""

    workers: int
    link: LinkRate | None = None  # between two of them
    price_hour: float = 0.0


@dataclass(frozen=True)
class NetworkRate:
    """Between nodes; the rate is a node's, each way."""

    latency_us: float
    gb_s: float
    nodes_a_switch: int = 0  # 0: one switch for all
    oversubscription: float = 1.0  # of what leaves a switch


@dataclass(frozen=True)
class FeedRate:
    """How a node reads images."""

    disk_mb_s: float = 0.0  # 0: not known
    decode_img_s: float = 0.0  # of one core, JPEGs of 500 × 375 to crops of 224
    cores: int = 0


@dataclass(frozen=True)
class ExchangeTimes:
    """Measured seconds of one kind of exchange by its bytes."""

    kind: str  # reduce, gather, swap or send
    workers: int
    mb: tuple[float, ...]
    ms: tuple[float, ...]


@dataclass(frozen=True)
class CodecTime:
    """Nanoseconds of a worker for each gradient value that `train.compress` takes."""

    scheme: str  # as train.compress has it
    lane_ns: float  # a lane's gradients compressed
    mean_ns: float  # the mean compressed, and unpacked
    commit_ns: float  # what was left out is kept


@dataclass(frozen=True)
class Cluster:
    """Workers, nodes, links; `how` says where each figure comes from."""

    name: str
    worker: WorkerSpeed
    node: NodeShape
    network: NetworkRate | None = None
    feed: FeedRate = FeedRate()
    exchange: tuple[ExchangeTimes, ...] = ()
    how: Mapping[str, str] = field(default_factory=dict)
    codec: tuple[CodecTime, ...] = ()

    def __post_init__(self) -> None:
        _check(self, "")
        if self.worker.kind not in KINDS:
            raise SpecError(f"worker.kind: {unknown('kind', self.worker.kind, KINDS)}")
        if "fp32" not in self.worker.gflop_s:
            raise SpecError("worker.gflop_s has no fp32: give the rate of fp32 products at least")
        if self.node.workers > 1 and not self.node.link:
            raise SpecError(
                f"node.workers={self.node.workers}, and [node.link] is missing: give latency_us and gb_s "
                "between two workers of a node"
            )
        if any(part < 1 for part in self.worker.slowdown):
            raise SpecError(f"worker.slowdown={list(self.worker.slowdown)}: no part may be below 1")
        if self.network and self.network.oversubscription < 1:
            raise SpecError(
                f"network.oversubscription={self.network.oversubscription} must be 1 or more: 2 means that "
                "half of what the nodes of a switch can send leaves it at once"
            )
        for measured in self.exchange:
            if measured.kind not in EXCHANGES:
                raise SpecError(f"exchange.kind: {unknown('kind', measured.kind, EXCHANGES)}")
            if len(measured.mb) != len(measured.ms) or list(measured.mb) != sorted(set(measured.mb)):
                raise SpecError("exchange: mb must rise, and ms must have a number for each of mb")
            if not measured.mb[-1]:
                raise SpecError("exchange.mb=[0.0] has no size above 0: give one, and its ms")

        for codec in self.codec:
            try:
                compression = read_compression(codec.scheme)
            except SpecError as error:
                raise SpecError(f"codec.scheme: {error}") from None
            if not compression:
                raise SpecError("codec.scheme=none takes no time: leave its table out")

    def slowdown(self, workers: int) -> float:
        """Of computing, while so many workers compute."""
        busy = min(workers, self.node.workers, len(self.worker.slowdown))
        return self.worker.slowdown[busy - 1]

    def nodes(self, workers: int) -> int:
        """How many nodes so many workers fill; an error if there is no network between them."""
        count = -(-workers // self.node.workers)
        if count > 1 and not self.network:
            raise SpecError(
                f"{workers} workers are {count} nodes of {self.node.workers}, and cluster '{self.name}' has "
                f"no [network]: give its latency_us and gb_s, or at most {self.node.workers} workers"
            )
        return count


_MAY_BE_ZERO = {"launch_us", "step_ms", "price_hour", "nodes_a_switch", "disk_mb_s", "decode_img_s", "cores"}
_MAY_BE_ZERO |= {"latency_us", "mb", "ms", "lane_ns", "mean_ns", "commit_ns"}
_MOST = 1e12
_EXAMPLE = {"Mapping[str, float]": "1.0", "Mapping[str, str]": '"TEXT"'}


def _check(value: Any, where: str) -> None:
    """Refuse values of another type, and numbers that no machine has."""
    for item in fields(value):
        key, found, kind = f"{where}{item.name}", getattr(value, item.name), str(item.type)
        if is_dataclass(found):
            _check(found, f"{key}.")
        elif kind in ("float", "int"):
            _check_number(key, found, item.name, kind)
        elif kind == "str":
            _expect(key, found, isinstance(found, str), "text")
        elif kind.startswith("Mapping"):
            _expect(key, found, isinstance(found, Mapping), f"a table, as {{ NAME = {_EXAMPLE[kind]} }}")
            for name, part in found.items():
                if "float" in kind:
                    _check_number(f"{key}.{name}", part, item.name, "float")
                else:
                    _expect(f"{key}.{name}", part, isinstance(part, str), "text")
        elif kind == "tuple[float, ...]":
            _expect(key, found, isinstance(found, tuple) and bool(found), "a list of numbers, as [1.0]")
            for part in found:
                _check_number(key, part, item.name, "float")
        elif isinstance(found, tuple):
            for part in found:
                _check(part, f"{key}.")


def _check_number(key: str, value: Any, name: str, kind: str) -> None:
    number, least = accept_number(key, value), name in _MAY_BE_ZERO
    _expect(key, value, kind == "float" or isinstance(value, int), "a whole number")
    if number < 0 or (number == 0 and not least):
        raise SpecError(f"{key}={value} must be {'0 or more' if least else 'above 0'}")
    if number and not 1 / _MOST <= number <= _MOST:  # seconds that follow from it stay finite
        raise SpecError(f"{key}={value:g} must be from {1 / _MOST:g} to {_MOST:g}")


def _expect(key: str, value: Any, holds: bool, rule: str) -> None:
    if not holds:
        raise SpecError(f"{key}={list(value) if isinstance(value, tuple) else repr(value)} must be {rule}")
