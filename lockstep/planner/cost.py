"""The closed form: how long a step of a plan takes, part by part."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from lockstep.planner.exchange_time import Ring, bucket_s, gather_s, send_s
from lockstep.planner.step_work import StageWork, StepWork


@dataclass(frozen=True)
class StepCost:
    """Seconds of a step; `total_s` is the sum of the parts, but for what is hidden."""

    compute_s: float  # of the busiest worker
    codec_s: float  # the busiest worker's lanes compressed
    inside_s: float  # rows and channels exchanged within layers
    bubble_s: float  # waiting for other stages
    exposed_s: float  # gradients exchanged, while nothing is computed
    hidden_s: float  # the same beside computing
    gather_s: float  # parameters collected
    update_s: float
    host_s: float
    data_s: float  # waiting for images
    total_s: float
    images: int
    sent_bytes: int = 0  # of gradients, by the worker that sends the most; 0 with a plan that splits more

    @property
    def img_s(self) -> float:
        return self.images / self.total_s

    @property
    def exchange_s(self) -> float:
        """Of gradients, beside computing or not."""
        return self.exposed_s + self.hidden_s

    def parts(self) -> dict[str, float]:
        """The parts that add up to the total, by name."""
        return {
            key: value
            for key, value in asdict(self).items()
            if key not in ("hidden_s", "total_s", "images", "sent_bytes")
        }

    def segments(self) -> dict[str, float]:
        """The parts that a run can measure of itself: its lanes, the exchange after them, the rest."""
        lanes = self.compute_s + self.codec_s + self.inside_s + self.bubble_s
        return {
            "step_s": self.total_s,
            "compute_s": lanes,
            "exchange_s": self.exposed_s,
            "hidden_s": self.hidden_s,
            "host_s": self.gather_s + self.update_s + self.host_s,
            "data_s": self.data_s,
        }


def predict(work: StepWork) -> StepCost:
    """A step of all workers; the slowest of each part counts."""
    plan, cluster = work.plan, work.cluster
    stage_time = [_lane_s(stage) for stage in work.stages]
    longest = max(range(len(stage_time)), key=stage_time.__getitem__)
    stage, lanes = work.stages[longest], work.stages[longest].lanes
    compute = lanes * (stage.forward_s + stage.backward_s)
    codec, inside = lanes * stage.codec_s, lanes * stage.inside_s
    bubble = sum(stage_time) - stage_time[longest] + 2 * sum(send_times(work)) + _held_up_s(work, stage)
    ring = Ring(plan.data, plan.cells)
    exchange = max(sum(_bucket_times(work, one, ring)) for one in work.stages)
    exposed = max(
        max(_exposed_s(work, one, ring) - after, 0.0)
        for one, after in zip(work.stages, _after_last_lane(work), strict=True)
    )
    gather = max(
        gather_s(cluster, ring, one.gather_bytes) if one.gather_bytes else 0.0 for one in work.stages
    )
    update = max(one.update_s for one in work.stages)
    busy = compute + codec + inside + bubble + exposed + gather + update + work.host_s
    data = max(work.data_s - busy, 0.0)
    return StepCost(
        compute_s=compute,
        codec_s=codec,
        inside_s=inside,
        bubble_s=bubble,
        exposed_s=exposed,
        hidden_s=max(exchange - exposed, 0.0),
        gather_s=gather,
        update_s=update,
        host_s=work.host_s,
        data_s=data,
        total_s=busy + data,
        images=work.images,
        sent_bytes=0 if work.plan.splits else work.stages[0].sent_bytes,
    )


def _lane_s(stage: StageWork) -> float:
    return stage.forward_s + stage.backward_s + stage.inside_s


def _held_up_s(work: StepWork, stage: StageWork) -> float:
    """What the longest stage waits for messages, beside those of the first lane.

    By gpipe lanes follow each other freely, so only a message that takes longer than a pass holds them up. By
    1f1b a stage takes up a lane when another has come back: of neighbouring stages that are n, a lane's way
    through all of them and back lets n lanes pass.
    """
    sends = send_times(work)
    if work.plan.schedule == "1f1b":
        times = [_lane_s(one) for one in work.stages]
        ways = [
            (sum(times[first:last]) + 2 * sum(sends[first : last - 1])) / (last - first)
            for first in range(len(times))
            for last in range(first + 1, len(times) + 1)
        ]
        return max(stage.lanes - 2, 0) * (max(ways) - max(times))
    send = max(sends, default=0.0)
    passes = (one + stage.inside_s / 2 for one in (stage.forward_s, stage.backward_s))
    return (stage.lanes - 1) * sum(max(send - one, 0.0) for one in passes)


def send_times(work: StepWork) -> list[float]:
    """Seconds of a lane's message from each stage to the next."""
    stride = work.plan.data * work.plan.cells
    return [
        send_s(work.cluster, stride, stage.send_bytes, place) if stage.send_bytes else 0.0
        for place, stage in enumerate(work.stages[:-1])
    ]


def _exposed_s(work: StepWork, stage: StageWork, ring: Ring) -> float:
    """Buckets go one after another, each when it is ready; what is left after the last lane is exposed.

    So is what the worker itself does for them, as it computes meanwhile.
    """
    times = _bucket_times(work, stage, ring)
    if not work.overlaps:
        return sum(times)
    free, span_s = 0.0, stage.backward_s + stage.codec_s + stage.inside_s / 2  # half of inside is forward
    for bucket, seconds in zip(stage.buckets, times, strict=True):
        free = max(free, bucket.ready * span_s) + seconds
    return max(free - span_s, sum(bucket.busy_s for bucket in stage.buckets))


def _after_last_lane(work: StepWork) -> list[float]:
    """Seconds of each stage, done with its last lane, in which the stages before it still compute."""
    seconds = [0.0]
    for stage, send in zip(work.stages, send_times(work), strict=False):
        seconds.append(seconds[-1] + stage.backward_s + stage.inside_s / 2 + send)
    return seconds


def _bucket_times(work: StepWork, stage: StageWork, ring: Ring) -> list[float]:
    sharded = work.plan.shard != "none"
    return [bucket_s(work.cluster, ring, bucket, sharded) for bucket in stage.buckets]
