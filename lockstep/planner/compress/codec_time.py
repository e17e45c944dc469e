"""Seconds of codecs for each value: as a probe measured them, else by what they must read and write."""

from __future__ import annotations

from lockstep.spec.cluster import Cluster, CodecTime
from lockstep.spec.rule.compression import Compression, read_compression

# Bytes of memory for each value: a lane's gradient and what it remembers read, what travels, what is lost and
# what is summed written; then decoded; then what was lost is kept. An assumption, as are the passes of `top`.
_LANE, _DECODE, _COMMIT = 20.0, 12.0, 8.0
_TOP_PASSES = 3.0


def find_codec(cluster: Cluster, how: Compression) -> tuple[CodecTime, bool]:
    """Nanoseconds a value of one worker that computes alone, and whether they were measured.

    Of another share or rank than was measured: on a line through the two nearest, beyond the largest too.
    """
    rows = sorted(
        (found.amount, row)
        for row in cluster.codec
        if (found := read_compression(row.scheme)) and found.kind == how.kind
    )
    if not rows:
        return _assume(cluster, how), False
    above = next((place for place, (amount, _) in enumerate(rows) if amount >= how.amount), len(rows) - 1)
    high, low = rows[above], rows[max(above - 1, 0)]
    if high[0] == low[0] or how.amount == high[0]:
        return high[1], True
    share = (how.amount - low[0]) / (high[0] - low[0])
    lane, mean, commit = (
        max(getattr(low[1], key) + share * (getattr(high[1], key) - getattr(low[1], key)), 0.0)
        for key in ("lane_ns", "mean_ns", "commit_ns")
    )
    return CodecTime(high[1].scheme, lane, mean, commit), True


def _assume(cluster: Cluster, how: Compression) -> CodecTime:
    speed = cluster.worker
    lane, mean = _LANE / speed.memory_gb_s, (_LANE + _DECODE) / speed.memory_gb_s
    if how.kind == "top":
        lane, mean = _TOP_PASSES * lane, mean + (_TOP_PASSES - 1) * lane
    product = 2 * how.rank / speed.gflop_s["fp32"]  # of each value with each column of a factor
    return CodecTime(how.kind, lane + product, mean + 3 * product, _COMMIT / speed.memory_gb_s)


def decode_ns(codec: CodecTime) -> float:
    """To unpack a value: what a mean takes beyond being packed, which takes as long as a lane's gradient."""
    return max(codec.mean_ns - codec.lane_ns, 0.1 * codec.mean_ns)
