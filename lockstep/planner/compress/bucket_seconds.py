"""When a stage's gradients travel, how long it takes, and what codecs take of a worker's time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from lockstep.planner.compress.codec_time import decode_ns, find_codec
from lockstep.planner.compress.parcel import Parcel, Sender
from lockstep.planner.exchange_time import Ring, bucket_s, messages_s, near_s, reduce_s
from lockstep.planner.step_work import BucketWork
from lockstep.spec.cluster import Cluster, CodecTime
from lockstep.spec.plan import Plan
from lockstep.spec.profile import LayerProfile, Profile, WeightShape
from lockstep.spec.rule.compression import Compression, read_compression
from lockstep.spec.run import Run

_COPIED = 12.0  # bytes for each of a gradient: packed, sent, got, summed, and means alike; an assumption
_NUMBERS = (1, 1, 1, 1)  # the loss, right answers and two requests, which travel beside gradients


@dataclass(frozen=True)
class Travel:
    """What a stage's gradients cost, beside computing them; seconds of a worker with others beside it."""

    buckets: tuple[BucketWork, ...] = ()
    lane_s: float = 0.0  # a lane's gradients compressed
    update_s: float = 0.0  # what was left out is kept; at one worker the mean compressed, too
    sent_bytes: int = 0  # by the worker that sends the most


@dataclass(frozen=True)
class Traveller:
    """A run's gradients over the workers along `data`; `slow`: how much longer they compute side by side."""

    run: Run
    profile: Profile
    cluster: Cluster
    plan: Plan
    slow: float

    def travel(self, own: range, backward_s: Sequence[float], left_out: set[str]) -> Travel:
        """Of the layers of a stage, but for some; `backward_s` of each layer of the model."""
        train, alone = self.run.train, self.plan.data == 1
        sender = Sender(train.lanes, self.plan.data, self._how, 2 if train.wire == "bf16" else 4)
        is_all = len(own) == len(self.profile.layers) and bool(self.profile.weights)
        others = (*self.profile.buffers, *_NUMBERS) if is_all else ()
        parcels = sender.parcels(self._weights(own, left_out), others)
        done, spent, ready = self._done(own, backward_s), 0.0, list[float]()
        for parcel in parcels:
            spent += self._seconds(parcel.values, self._codec.lane_ns) if parcel.values else 0.0
            last = max(done.get(_layer_of(name), sum(backward_s)) for name in parcel.names)
            ready.append(last + spent)
        end = sum(backward_s[i] for i in own) + spent
        kept_s = sum(self._seconds(p.values, self._codec.commit_ns) for p in parcels if p.values)
        pairs = [] if alone else zip(parcels, ready, strict=True)
        return Travel(
            buckets=tuple(self._bucket(parcel, min(at / end, 1.0) if end else 1.0) for parcel, at in pairs),
            lane_s=spent,
            update_s=self._lanes * kept_s + (sum(map(self._mean_s, parcels)) if alone else 0.0),
            sent_bytes=max(map(sum, zip(*(parcel.sent for parcel in parcels), strict=True)), default=0),
        )

    def _weights(self, own: range, left_out: set[str]) -> list[WeightShape]:
        layers = [self.profile.layers[i] for i in own]
        stage = {base_name(layer) for layer in layers} - {name.partition(" ")[0] for name in left_out}
        every = {base_name(layer) for layer in self.profile.layers}
        return [
            each
            for each in find_weights(self.profile)
            if _layer_of(each.name) in stage or (_layer_of(each.name) not in every and own.start == 0)
        ]

    def _done(self, own: range, backward_s: Sequence[float]) -> dict[str, float]:
        """By layer, the seconds of the backward pass until its gradients are known."""
        found, seconds = dict[str, float](), 0.0
        for i in reversed(own):
            seconds += backward_s[i]
            found[base_name(self.profile.layers[i])] = seconds  # of several calls the first one counts
        return found

    def _bucket(self, parcel: Parcel, ready: float) -> BucketWork:
        cluster, ring = self.cluster, Ring(self.plan.data, self.plan.cells)
        if not parcel.rounds:
            return BucketWork(parcel.num_bytes, ready, None, self._busy_s(parcel.num_bytes))
        codec_s = self._exchange_s(parcel)
        if self._by_rank and cluster.worker.kind == "gpu":  # factors are plain sums
            whole = [most * ring.size / (ring.size - 1) for most in parcel.rounds[1::2]]
            seconds = sum(reduce_s(cluster, ring, num_bytes) for num_bytes in whole)
        else:
            seconds = sum(messages_s(cluster, ring, most) for most in parcel.rounds)
        return BucketWork(sum(parcel.rounds), ready, seconds + codec_s, codec_s)

    def _busy_s(self, num_bytes: int) -> float:
        """What a core itself does for plain gradients: copies, and all of the exchange within a node."""
        cluster, ring = self.cluster, Ring(self.plan.data, self.plan.cells)
        if cluster.worker.kind == "gpu":
            return 0.0
        sharded = self.plan.shard != "none"
        copied_s = 1e-9 * self.slow * _COPIED * num_bytes / cluster.worker.memory_gb_s
        busy_s = (near_s(cluster, ring, num_bytes) + copied_s) / (1 + sharded)
        return min(busy_s, bucket_s(cluster, ring, BucketWork(num_bytes, 1.0), sharded))

    def _exchange_s(self, parcel: Parcel) -> float:
        """What codecs take within an exchange: parts unpacked and added, their mean packed, all unpacked."""
        if self._by_rank:
            return self._mean_s(parcel)
        unpack_ns = decode_ns(self._codec)
        own = self._seconds(parcel.own_values, parcel.parts * unpack_ns + self._codec.lane_ns)
        return own + self._seconds(parcel.values, unpack_ns)

    def _mean_s(self, parcel: Parcel) -> float:
        """A mean compressed and unpacked; by rank half of it is for every lane."""
        times = (1 + self._lanes) / 2 if self._by_rank else 1.0
        return self._seconds(parcel.values, times * self._codec.mean_ns) if parcel.values else 0.0

    def _seconds(self, values: int, ns: float) -> float:
        return 1e-9 * values * ns * self.slow

    @property
    def _lanes(self) -> int:
        """Of the busiest worker."""
        return -(-self.run.train.lanes // self.plan.data)

    @property
    def _by_rank(self) -> bool:
        return bool(self._how and self._how.rank)

    @cached_property
    def _how(self) -> Compression | None:
        return read_compression(self.run.train.compress)

    @cached_property
    def _codec(self) -> CodecTime:
        assert self._how
        return find_codec(self.cluster, self._how)[0]


def base_name(layer: LayerProfile) -> str:
    """A layer's name without the (2) of a second call."""
    return layer.name.partition(" ")[0]


def _layer_of(weight: str) -> str:
    return weight.rpartition(".")[0]


def find_weights(profile: Profile) -> Sequence[WeightShape]:
    """The model's parameters; where a profile has only their number, a matrix with a row for each output."""
    if profile.weights:
        return profile.weights
    found = list[WeightShape]()
    for layer in profile.layers:
        rows = layer.channels if layer.macs else 1
        columns = layer.parameters // rows
        if columns:
            shape = (rows, columns) if layer.macs else (columns,)
            found.append(WeightShape(f"{base_name(layer)}.weight", shape))
        if left := layer.parameters - rows * columns:
            found.append(WeightShape(f"{base_name(layer)}.bias", (left,)))
    return found
