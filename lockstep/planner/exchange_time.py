"""Seconds of an exchange: as measured for as many workers, else from latency and rate of the links.

A group of workers along an axis lies `stride` ranks apart; it is within a node if all of it fits there.
Between nodes, all groups of a node use its network at once.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from lockstep.planner.step_work import BucketWork
from lockstep.spec.cluster import Cluster, ExchangeTimes, LinkRate

HOST_GB_S = 1.9  # of a GPU's worker through host memory: an assumption, as between two of cpu-1g


@dataclass(frozen=True)
class Ring:
    """Workers of one group: how many, and how many ranks apart."""

    size: int
    stride: int = 1


def reduce_s(cluster: Cluster, ring: Ring, num_bytes: float) -> float:
    """Gradients summed by the lane tree: a reduce-scatter by all_to_all, and an all-gather."""
    if ring.size == 1:
        return 0.0
    if measured := _find(cluster, "reduce", ring):
        return _interpolate(measured, num_bytes)
    return 2 * _one_way(cluster, ring, num_bytes)


def bucket_s(cluster: Cluster, ring: Ring, bucket: BucketWork, sharded: bool) -> float:
    """A bucket of gradients: everybody gets their sum, or of a shard each only its own part of it."""
    if bucket.seconds is not None:
        return bucket.seconds
    return (gather_s if sharded else reduce_s)(cluster, ring, bucket.num_bytes)


def near_s(cluster: Cluster, ring: Ring, num_bytes: float) -> float:
    """The part of `reduce_s` that is within a node."""
    return reduce_s(cluster, Ring(_local(cluster, ring), ring.stride), num_bytes)


def messages_s(cluster: Cluster, ring: Ring, num_bytes: float) -> float:
    """A round of messages through host memory: each worker sends so much to all others of it together.

    Every message goes its own way, so those of a node's workers share its network.
    """
    local, on_cpu = _local(cluster, ring), cluster.worker.kind == "cpu"
    each, seconds = num_bytes / (ring.size - 1), 0.0
    if on_cpu and (measured := _find(cluster, "gather", ring)):
        return _interpolate(measured, each * ring.size)
    if local > 1:
        link = find_link(cluster, Ring(local, ring.stride))
        rate = link.gb_s if on_cpu else min(link.gb_s, HOST_GB_S)
        seconds += _depth(local) * link.latency_us * 1e-6 + each * (local - 1) / (rate * 1e9)
    if ring.size > local:
        link, senders = find_link(cluster, ring), min(cluster.node.workers, ring.size * ring.stride)
        rate = link.gb_s if on_cpu else min(link.gb_s, senders * HOST_GB_S)
        sent = each * (ring.size - local) * senders
        seconds += _depth(-(-ring.size // local)) * link.latency_us * 1e-6 + sent / (rate * 1e9)
    return seconds


def gather_s(cluster: Cluster, ring: Ring, num_bytes: float) -> float:
    """Everybody gets all of the bytes, of which each has an equal part; a reduce-scatter takes as long."""
    if ring.size == 1:
        return 0.0
    if measured := _find(cluster, "gather", ring):
        return _interpolate(measured, num_bytes)
    return _one_way(cluster, ring, num_bytes)


def swap_s(cluster: Cluster, ring: Ring, num_bytes: float) -> float:
    """A gather within a lane, to which workers come from computing: now one is late, now another."""
    if ring.size > 1 and (measured := _find(cluster, "swap", ring)):
        return _interpolate(measured, num_bytes)
    return gather_s(cluster, ring, num_bytes)


def send_s(cluster: Cluster, stride: int, num_bytes: float, stage: int = 0) -> float:
    """From each worker of a stage to its like of the next; those of a node share its network.

    A stage is `stride` ranks, and stages lie one after another over the nodes: only some cross between two.
    """
    first, last = stage * stride, (stage + 2) * stride - 1
    is_inside = _is_within(first, last, cluster.node.workers)
    if is_inside and (measured := _find(cluster, "send", Ring(2, stride))):
        return _interpolate(measured, num_bytes)
    if is_inside:
        link, senders = find_link(cluster, Ring(2, stride)), 1
    else:
        size = cluster.node.workers * (cluster.network.nodes_a_switch if cluster.network else 0)
        link = _network_link(cluster, over_switches=bool(size) and not _is_within(first, last, size))
        senders = min(stride, cluster.node.workers)
    return link.latency_us * 1e-6 + num_bytes * senders / (link.gb_s * 1e9)


def _is_within(first: int, last: int, size: int) -> bool:
    """Whether both ranks are in the same of equal parts, each of so many ranks."""
    return first // size == last // size


def find_link(cluster: Cluster, ring: Ring) -> LinkRate:
    """What one worker of a group has to send to the others of it; the slowest part decides."""
    if ring.size * ring.stride <= cluster.node.workers and cluster.node.link:
        return cluster.node.link
    nodes = -(-ring.size * ring.stride // cluster.node.workers)
    size = cluster.network.nodes_a_switch if cluster.network else 0
    return _network_link(cluster, over_switches=bool(size) and nodes > size)


def _network_link(cluster: Cluster, over_switches: bool) -> LinkRate:
    network = cluster.network
    assert network, "nodes() refuses several nodes without a network"
    return LinkRate(network.latency_us, network.gb_s / (network.oversubscription if over_switches else 1.0))


def _one_way(cluster: Cluster, ring: Ring, num_bytes: float) -> float:
    """Each sends (n − 1)/n of the bytes, in n − 1 messages of which several travel at once.

    Over nodes, cores send each message by itself. GPUs of a node exchange first within it; then a node sends
    each byte once.
    """
    local = _local(cluster, ring)
    if cluster.worker.kind == "cpu" and local < ring.size:
        return messages_s(cluster, ring, num_bytes * (ring.size - 1) / ring.size)
    nodes = -(-ring.size // local)
    seconds = 0.0
    if local > 1:
        link = find_link(cluster, Ring(local, ring.stride))
        seconds += _depth(local) * link.latency_us * 1e-6 + num_bytes * (local - 1) / local / (
            link.gb_s * 1e9
        )
    if nodes > 1:
        link = find_link(cluster, ring)
        groups = min(cluster.node.workers // local, ring.stride)  # of a node, each with bytes of its own
        each = num_bytes * max(groups, 1) * (nodes - 1) / nodes
        seconds += _depth(nodes) * link.latency_us * 1e-6 + each / (link.gb_s * 1e9)
    return seconds


def _local(cluster: Cluster, ring: Ring) -> int:
    """How many workers of a group are on one node."""
    return max(min(ring.size, cluster.node.workers // ring.stride), 1)


def _depth(count: int) -> int:
    """Messages one after another: the depth of a tree."""
    return (count - 1).bit_length()


def _find(cluster: Cluster, kind: str, ring: Ring) -> ExchangeTimes | None:
    """What was measured for as many workers of one node."""
    if ring.size * ring.stride > cluster.node.workers:
        return None
    return next((row for row in cluster.exchange if row.kind == kind and row.workers == ring.size), None)


def _interpolate(measured: ExchangeTimes, num_bytes: float) -> float:
    """Between two sizes that were measured by a straight line; beyond the largest in proportion."""
    mb, sizes, times = num_bytes / 1e6, measured.mb, measured.ms
    place = bisect_left(sizes, mb)
    if place == 0:
        return times[0] * 1e-3
    if place == len(sizes):
        return times[-1] * 1e-3 * mb / sizes[-1]
    low, high = sizes[place - 1], sizes[place]
    share = (mb - low) / (high - low)
    return (times[place - 1] + share * (times[place] - times[place - 1])) * 1e-3
