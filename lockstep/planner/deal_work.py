"""Deals a step to the workers of a plan: (Run, Profile, Cluster, Plan) → StepWork.

What the parallel code does, in numbers: lanes a worker, the layers of a stage, the part of a layer, and what
each of them sends. The model is taken as a chain of layers; a skip over a cut counts as one of its values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.planner.compress.bucket_seconds import Traveller, base_name
from lockstep.planner.exchange_time import Ring, gather_s, swap_s
from lockstep.planner.lane_time import LaneTime, find_lane_time
from lockstep.planner.layer_seconds import LayerTable, Pass
from lockstep.planner.step_work import StageWork, StepWork
from lockstep.spec.cluster import Cluster
from lockstep.spec.plan import Plan
from lockstep.spec.profile import LayerProfile, Profile
from lockstep.spec.rule.split_pattern import is_split
from lockstep.spec.run import Run

_VALUE = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}  # bytes of an activation
_FEW_ROWS = 4  # of a band: fewer are not cut
_WALK_BYTES, _KEPT_BYTES = 32, 16  # of a weight: a step by itself and its sum; a copy, made and put back
_SMALL = 4096.0  # bytes of statistics, which a batch norm exchanges


@dataclass(frozen=True)
class Dealer:
    """The parts that do not depend on the stage."""

    run: Run
    table: LayerTable
    plan: Plan

    @property
    def profile(self) -> Profile:
        return self.table.profile

    @property
    def cluster(self) -> Cluster:
        return self.table.cluster

    @property
    def images(self) -> int:
        return self.table.images

    @property
    def _at_once(self) -> int:
        """Lanes that one operation computes: by fused and compiled kernels all, but in a pipeline."""
        is_stock = self.run.kernels.set == "stock" or self.run.train.local_steps > 1
        if self.cluster.worker.kind != "gpu" or is_stock or self.plan.pipeline > 1:
            return 1
        return -(-self.run.train.lanes // self.plan.data)

    def deal(self) -> StepWork:
        """The work of a step."""
        run, plan, cluster = self.run, self.plan, self.cluster
        workers = plan.data * plan.least
        cluster.nodes(workers)  # an error without a network
        lanes = -(-run.train.lanes // plan.data)
        lane = find_lane_time(run, self.table, lanes, self._at_once)
        slow = cluster.slowdown(workers)
        passes = [self._part(place, lane, slow) for place in range(len(self.profile.layers))]
        cuts = cut_stages([one.both_s for one in passes], plan.pipeline)
        stages = tuple(self._stage(own, passes, lane, lanes, slow) for own in cuts)
        overlaps = cluster.worker.kind == "gpu" or plan.data * plan.cells > cluster.node.workers
        return StepWork(
            cluster,
            plan,
            stages,
            lane.host_s,
            self._data_s(),
            run.train.batch,
            overlaps,
            run.train.local_steps,
        )

    def _part(self, place: int, lane: LaneTime, slow: float) -> Pass:
        """What a worker computes of a layer."""
        plan, layer = self.plan, self.profile.layers[place]
        whole, part = self.table.passes("", self._at_once)[place], Pass(1.0, 1.0)
        for axis in ("channel", "spatial"):
            count = getattr(plan, axis)
            if count > 1 and self._is_cut(layer, axis):
                own = self.table.passes(f"{axis}={count}", self._at_once)[place]
                part = Pass(
                    part.forward_s * own.forward_s / max(whole.forward_s, 1e-12),
                    part.backward_s * own.backward_s / max(whole.backward_s, 1e-12),
                )
        return Pass(
            slow * whole.forward_s * (lane.scale * part.forward_s + lane.rest),
            slow * whole.backward_s * (lane.scale * part.backward_s + lane.rest),
        )

    def _is_cut(self, layer: LayerProfile, axis: str) -> bool:
        if axis == "channel":
            return layer.channels >= self.plan.channel
        return layer.rows >= _FEW_ROWS * max(self.run.train.bands, self.plan.spatial)

    def _stage(
        self, own: range, passes: Sequence[Pass], lane: LaneTime, lanes: int, slow: float
    ) -> StageWork:
        layers = [self.profile.layers[i] for i in own]
        forward, backward = (sum(getattr(passes[i], key) for i in own) for key in ("forward_s", "backward_s"))
        count = sum(layer.parameters for layer in layers)
        split = [layer for layer in layers if self._by_layer(layer)]
        kept = count - sum(layer.parameters for layer in split)
        share = count / max(self.profile.parameters, 1)
        shards = self.plan.data // self.plan.replicas if self.plan.shard != "none" else 1
        updated = (kept + (count - kept) / self.plan.data) / max(count, 1) / shards
        is_last = own.stop == len(self.profile.layers)
        width = _VALUE[self.profile.precision]
        traveller = Traveller(self.run, self.profile, self.cluster, self.plan, slow)
        travel = traveller.travel(own, [one.backward_s for one in passes], {layer.name for layer in split})
        return StageWork(
            lanes=lanes,
            forward_s=forward,
            backward_s=backward + self._walk_s(count) * slow,
            inside_s=self._inside(layers) + self._mix(split) + self._given_away(count, lanes),
            send_bytes=0.0 if is_last else width * self.images * layers[-1].outputs,
            buckets=travel.buckets,
            update_s=lane.update_s * slow * share * updated + travel.update_s,
            gather_bytes=4.0 * count if self.plan.shard in ("optimizer", "gradients") else 0.0,
            codec_s=travel.lane_s,
            sent_bytes=travel.sent_bytes,
        )

    def _walk_s(self, parameters: int) -> float:
        """Seconds of a lane and step in which its own weights go on, and are kept and restored by round."""
        steps = self.run.train.local_steps
        if steps == 1:
            return 0.0
        num_bytes = (_WALK_BYTES * (steps - 1) + _KEPT_BYTES) / steps
        return parameters * num_bytes / (self.cluster.worker.memory_gb_s * 1e9)

    def _by_layer(self, layer: LayerProfile) -> bool:
        """Whether `layers` of the plan deals this one out by channel."""
        return layer.kind == "fully connected" and is_split(self.plan.layers, base_name(layer))

    def _inside(self, layers: Sequence[LayerProfile]) -> float:
        """Seconds of a lane in which workers that share its layers exchange values."""
        plan, cluster, width, seconds = self.plan, self.cluster, _VALUE[self.profile.precision], 0.0
        if plan.channel > 1:
            ring = Ring(plan.channel)
            for layer in layers:
                if layer.macs and layer.groups == 1 and self._is_cut(layer, "channel"):
                    seconds += swap_s(cluster, ring, width * self.images * layer.inputs)
                    seconds += swap_s(cluster, ring, width * self.images * layer.outputs)
            seconds += swap_s(cluster, ring, 4.0 * sum(layer.parameters for layer in layers))
        if plan.spatial > 1:
            ring = Ring(plan.spatial, plan.channel)
            for layer in layers:
                if layer.halo and self._is_cut(layer, "spatial"):
                    rows = width * self.images * layer.halo * layer.inputs / max(layer.rows, 1)
                    seconds += 2 * swap_s(cluster, ring, plan.spatial * rows)
                if layer.kind == "norm" and self._is_cut(layer, "spatial"):
                    seconds += 2 * swap_s(cluster, ring, _SMALL)
            seconds += 2 * swap_s(cluster, ring, 4.0 * sum(layer.parameters for layer in layers))
        return seconds

    def _mix(self, split: Sequence[LayerProfile]) -> float:
        """Seconds of a lane that layers by channel over `data` take: inputs to all, outputs back."""
        ring = Ring(self.plan.data)
        values = sum(2 * layer.inputs + 2 * layer.outputs / self.plan.data for layer in split)
        return gather_s(self.cluster, ring, 4.0 * self.images * self.plan.data * values) if split else 0.0

    def _given_away(self, parameters: int, lanes: int) -> float:
        """Seconds of a lane, beside the last, in which gradients are given away and parameters gathered."""
        ring, seconds = Ring(self.plan.data, self.plan.cells), 0.0
        if self.plan.shards_gradients:
            seconds += gather_s(self.cluster, ring, 4.0 * parameters) * (lanes - 1) / lanes
        if self.plan.shard == "parameters":
            seconds += 2 * gather_s(self.cluster, ring, 4.0 * parameters)
        return seconds

    def _data_s(self) -> float:
        """Seconds to read and decode the images of the busiest node's workers, if they come from files."""
        feed, node = self.cluster.feed, self.cluster.node
        if self.run.data.name not in ("folder", "csv", "pack") or not feed.decode_img_s or not feed.cores:
            return 0.0
        first = self.plan.data * self.plan.cells  # of a pipeline only the first stage reads
        share = min(node.workers, first) / first
        return self.run.train.batch * share / (feed.decode_img_s * feed.cores)


def deal_work(run: Run, profile: Profile, cluster: Cluster, plan: Plan) -> StepWork:
    """The work of a step under a plan whose `data` is filled in."""
    return Dealer(run, make_table(run, profile, cluster), plan).deal()


def make_table(run: Run, profile: Profile, cluster: Cluster) -> LayerTable:
    """The layers of a run's lanes, for as many plans as are asked for."""
    return LayerTable(profile, cluster, run.train.batch // run.train.lanes)


def cut_stages(costs: Sequence[float], count: int) -> list[range]:
    """Neighbouring layers in so many stages, the longest of which is as short as can be, within 0.1 %."""
    count = min(count, len(costs))
    low, high = max(*costs, sum(costs) / count), sum(costs)
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if len(_fill(costs, middle, count)) <= count else (middle, high)
    stages = _fill(costs, high, count)
    while len(stages) < count:  # fewer would do: the longest are cut further
        place = max(range(len(stages)), key=lambda i: len(stages[i]))
        own = stages[place]
        stages[place : place + 1] = [own[: len(own) // 2], own[len(own) // 2 :]]
    return stages


def _fill(costs: Sequence[float], limit: float, most: int) -> list[range]:
    """Stages of at most `limit`, each as long as it can be."""
    stages, start, size = list[range](), 0, 0.0
    for place, cost in enumerate(costs):
        if place > start and size + cost > limit * (1 + 1e-9):
            stages.append(range(start, place))
            start, size = place, 0.0
            if len(stages) > most:
                break
        size += cost
    return [*stages, range(start, len(costs))]
