"""StepWork: what the workers of a plan have to do in a step, in seconds and bytes.

Both the closed form (`cost`) and the simulator take it, so that they speak of the same step.
"""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.spec.cluster import Cluster
from lockstep.spec.plan import Plan


@dataclass(frozen=True)
class BucketWork:
    """Gradients that are exchanged together."""

    num_bytes: float
    ready: float  # when they are known: the share of the last lane's backward pass that is done then, 0 to 1
    seconds: float | None = None  # of its exchange, if it is compressed; None: that of a sum of so many bytes
    busy_s: float = 0.0  # of these the worker's own, which nothing hides


@dataclass(frozen=True)
class StageWork:
    """One stage of a pipeline, or the whole model; a worker's own seconds, other workers computing beside."""

    lanes: int  # that its busiest worker computes
    forward_s: float  # of a lane
    backward_s: float  # of a lane, with its local sums
    inside_s: float  # of a lane: exchanges of rows and channels, which computing waits for
    send_bytes: float  # of a lane: to the next stage, and as many gradients back
    buckets: tuple[BucketWork, ...]  # along `data`, in the order in which they are ready
    update_s: float  # of the optimizer, for what a worker updates
    gather_bytes: float  # parameters that the workers along `data` collect in a step (shard)
    codec_s: float = 0.0  # of a lane: its gradients are compressed, at the end of its backward pass
    sent_bytes: int = 0  # of gradients, by the worker that sends the most


@dataclass(frozen=True)
class StepWork:
    """A step of all workers."""

    cluster: Cluster
    plan: Plan  # with `data` filled in
    stages: tuple[StageWork, ...]
    host_s: float  # of every step, whatever the plan
    data_s: float  # to read and decode a worker's images, beside computing
    images: int  # of the step, over all workers
    overlaps: bool  # whether a bucket travels while the rest is computed: on a CPU only over a network

    @property
    def workers(self) -> int:
        return self.plan.data * self.plan.least
