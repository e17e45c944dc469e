"""Seconds of a lane, of an update, and of what a step costs besides: from the steps of one worker.

A step of one worker with n lanes takes a + b·n: b is a lane, a is the update and the host's part. Both come
from measured steps with several numbers of lanes; without them, from the sum of the layers.
"""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.planner.layer_seconds import LayerTable, is_measured
from lockstep.spec.profile import LanesTime, Profile
from lockstep.spec.run import Run

_UPDATE_BYTES = {
    "sgd": 12,
    "momentum": 20,
    "nag": 20,
    "adam": 28,
    "adamw": 28,
}  # read and written, of a value
_ADD_BYTES = 12  # a gradient is added to a sum: two values read, one written


@dataclass(frozen=True)
class LaneTime:
    """Of one worker that computes alone."""

    forward_s: float  # of a lane
    backward_s: float  # of a lane, with its addition to the sum
    update_s: float  # of all parameters
    host_s: float  # of a step
    scale: float  # of the layers' seconds, where a lane takes less than their sum
    rest: float  # what a lane takes beyond its layers, as a share of their sum: no cut makes it less


def find_lane_time(run: Run, table: LayerTable, lanes: int, at_once: int) -> LaneTime:
    """For a worker with so many lanes of the run, of which some are computed at once."""
    profile, cluster = table.profile, table.cluster
    passes = table.passes("", at_once)
    forward, backward = (sum(getattr(p, key) for p in passes) for key in ("forward_s", "backward_s"))
    if is_measured(profile, cluster) and profile.lanes:
        fixed_s, lane_s = _measured(table, lanes)
        ratio = lane_s / (forward + backward) if forward + backward else 1.0
        update_s, scale = min(profile.update_s, fixed_s), min(ratio, 1.0)
        return LaneTime(
            ratio * forward, ratio * backward, update_s, fixed_s - update_s, scale, max(ratio - 1.0, 0.0)
        )
    speed = cluster.worker.memory_gb_s * 1e9
    backward += profile.parameters * _ADD_BYTES / speed
    update_s = profile.parameters * _UPDATE_BYTES.get(run.optimizer.name, 28) / speed
    return LaneTime(forward, backward, update_s, cluster.worker.step_ms * 1e-3, 1.0, 0.0)


def _measured(table: LayerTable, lanes: int) -> tuple[float, float]:
    """What a step takes whatever its lanes, and a lane.

    Of lanes of a size that was not measured, on a line through the two nearest sizes; if there was one size,
    a lane takes as many times as long as its layers do.
    """
    profile, images = table.profile, table.images
    sizes = {row.images for row in profile.lanes}
    if len(sizes) == 1 and images not in sizes:
        (near,) = sizes
        fixed_s, lane_s = _split(list(profile.lanes), lanes)
        return fixed_s, lane_s * table.whole_s(images) / max(table.whole_s(near), 1e-12)
    counts = sorted({row.lanes for row in profile.lanes})
    return _split([LanesTime(count, images, _at(profile, count, images)) for count in counts], lanes)


def _at(profile: Profile, lanes: int, images: int) -> float:
    rows = sorted(
        (row for row in profile.lanes if row.lanes == lanes), key=lambda row: abs(row.images - images)
    )
    near = rows[0]
    if near.images == images or len(rows) == 1:
        return near.seconds * images / near.images
    slope = (near.seconds - rows[1].seconds) / (near.images - rows[1].images)
    return max(near.seconds + slope * (images - near.images), near.seconds * min(images / near.images, 1.0))


def _split(rows: list[LanesTime], lanes: int) -> tuple[float, float]:
    """What a step takes whatever its lanes, and a lane: by the two measurements nearest to `lanes`."""
    rows = sorted(rows, key=lambda row: abs(row.lanes - lanes))[:2]
    first = rows[0]
    if len(rows) == 1:
        return 0.0, first.seconds / first.lanes
    lane_s = (first.seconds - rows[1].seconds) / (first.lanes - rows[1].lanes)
    lane_s = min(max(lane_s, 0.0), first.seconds / first.lanes)
    return first.seconds - lane_s * first.lanes, lane_s
