"""Steps as events: when each worker computes, sends, exchanges and waits.

All workers that compute a lane together are one replica of a stage: they go as fast as the slowest of them.
Events of a replica come in the order of its schedule, so each is later than the one before it and than what
it waits for. The replicas along `data` are the columns of arrays, several steps their rows.

Shapes: (steps, replicas along data); what all replicas of a stage do together (steps, 1).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lockstep.errors import SpecError
from lockstep.planner.cost import send_times
from lockstep.planner.exchange_time import Ring, bucket_s, gather_s
from lockstep.planner.simulation.event_trace import StepEvent
from lockstep.planner.step_work import StepWork

Times = NDArray[np.float64]
Turn = tuple[str, int]  # forward or backward, and the lane
_VALUES = 50_000  # of an array at a time, so that what is in flight stays small
_SHOWN = 8  # workers with a timeline


@dataclass(frozen=True)
class SimulatedSteps:
    """Seconds of each step, and the events of the first one for some workers."""

    seconds: tuple[float, ...]
    events: tuple[StepEvent, ...]

    @property
    def mean_s(self) -> float:
        return sum(self.seconds) / len(self.seconds)


def simulate_step(work: StepWork, seed: int = 0, spread: float = 0.0, steps: int = 1) -> SimulatedSteps:
    """Some steps, in each of which a worker computes exp(spread · normal) times as long as planned.

    The numbers follow from (seed, step, worker). All workers begin a step together.
    """
    for key, value, least in (("seed", seed, 0), ("steps", steps, 1)):
        if not isinstance(value, int) or value < least:
            raise SpecError(f"{key}={value} must be a whole number from {least}")
    if not 0 <= spread <= 2:
        raise SpecError(f"spread={spread} must be from 0 to 2: 0.1 is a standard deviation of about 10 %")
    if not spread:  # all replicas and all steps are alike
        total, events = _simulate(work, [np.ones((1, 1))] * len(work.stages), shown=True)
        return SimulatedSteps((float(total[0]),) * steps, events)
    rows = max(_VALUES // work.plan.data, 1)
    seconds: list[float] = []
    first: tuple[StepEvent, ...] = ()
    for begin in range(0, steps, rows):
        factors = _draw_factors(work, seed, spread, range(begin, min(begin + rows, steps)))
        total, events = _simulate(work, factors, shown=not begin)
        seconds += total.tolist()
        first = first or events
    return SimulatedSteps(tuple(seconds), first)


def _draw_factors(work: StepWork, seed: int, spread: float, steps: range) -> list[Times]:
    """For each stage how much longer each of its replicas computes: as the slowest worker of it."""
    plan = work.plan
    drawn = np.empty((len(steps), plan.pipeline, plan.data))
    for row, step in enumerate(steps):
        normal = np.random.Generator(np.random.Philox(key=(seed, step))).standard_normal(work.workers)
        drawn[row] = normal.reshape(plan.pipeline, plan.data, plan.cells).max(axis=2)
    return list(np.exp(spread * drawn).transpose(1, 0, 2))


def _simulate(work: StepWork, factors: list[Times], shown: bool) -> tuple[Times, tuple[StepEvent, ...]]:
    """Seconds of each step; events of the first."""
    diary = _Diary(work, shown)
    ends = _Pipeline(work, factors, diary).run()
    finished = []
    for number, (begin, computed) in enumerate(ends):
        summed = _exchange_gradients(work, number, begin, computed, diary)
        finished.append(_update(work, number, summed, factors[number], diary).max(axis=1))
    together = np.max(finished, axis=0)[:, None]
    end = together + work.host_s
    read = np.maximum(end, work.data_s)  # the next step's images, beside all this
    for number in range(len(work.stages)):
        diary.note(number, "host", "", together, end)
        diary.note(number, "data", "", end, read)
    return read[:, 0], tuple(diary.events)


class _Diary:
    """Notes the events of the first step, for the first replicas of each stage."""

    def __init__(self, work: StepWork, shown: bool) -> None:
        plan = work.plan
        stages = min(plan.pipeline, _SHOWN) if shown else 0
        replicas = min(plan.data, max(_SHOWN // plan.pipeline, 1))
        self._workers = {
            stage: [(copy, (stage * plan.data + copy) * plan.cells) for copy in range(replicas)]
            for stage in range(stages)
        }
        self.events: list[StepEvent] = []

    def note(self, stage: int, kind: str, label: object, start: Times, end: Times) -> None:
        for copy, worker in self._workers.get(stage, ()):
            begin, stop = (float(time[0, copy % time.shape[1]]) for time in (start, end))
            if stop > begin:
                self.events.append(StepEvent(worker, kind, str(label), begin, stop))


def stage_turns(schedule: str, depth: int, lanes: int) -> list[Turn]:
    """The order of a stage, as runs have it; `depth` counts the stages from this one on."""
    ahead = lanes if schedule == "gpipe" else min(depth - 1, lanes)
    turns = [("forward", lane) for lane in range(ahead)]
    for lane in range(lanes):
        turns += [("forward", lane + ahead)] * (lane + ahead < lanes) + [("backward", lane)]
    return turns


class _Pipeline:
    """All lanes through all stages; a plan without `pipeline` has one stage."""

    def __init__(self, work: StepWork, factors: list[Times], diary: _Diary) -> None:
        self._stages, self._factors, self._diary = work.stages, factors, diary
        count, lanes = len(work.stages), work.stages[0].lanes
        self._turns = [stage_turns(work.plan.schedule, count - stage, lanes) for stage in range(count)]
        self._send_s = send_times(work)
        self._together = work.plan.shards_gradients or bool(work.plan.layers)  # each lane along `data`
        begin = np.zeros_like(factors[0])
        self._free = [begin] * count  # when a stage has done its last turn
        self._link = [begin] * count  # when it has sent what that gave
        self._arrived: dict[tuple[str, int, int], Times] = {}

    def run(self) -> list[tuple[Times, Times]]:
        """For each stage when its last lane's backward pass begins and ends."""
        places, last = [0] * len(self._stages), [self._free[0]] * len(self._stages)
        while any(place < len(turns) for place, turns in zip(places, self._turns, strict=True)):
            for stage, turns in enumerate(self._turns):
                while places[stage] < len(turns) and self._can_begin(stage, turns[places[stage]]):
                    last[stage] = self._compute(stage, turns[places[stage]])
                    places[stage] += 1
        return list(zip(last, self._free, strict=True))

    def _source(self, stage: int, turn: Turn) -> int | None:
        """The stage whose result a turn needs."""
        source = stage - 1 if turn[0] == "forward" else stage + 1
        return source if 0 <= source < len(self._stages) else None

    def _can_begin(self, stage: int, turn: Turn) -> bool:
        return self._source(stage, turn) is None or (turn[0], stage, turn[1]) in self._arrived

    def _compute(self, stage: int, turn: Turn) -> Times:
        """One turn, and the message after it; gives its start."""
        work, note, (kind, lane) = self._stages[stage], self._diary.note, turn
        start = self._free[stage]
        if self._source(stage, turn) is not None:
            start = np.maximum(start, self._arrived.pop((kind, stage, lane)))
        own_s = work.forward_s if kind == "forward" else work.backward_s + work.codec_s
        computed = start + own_s * self._factors[stage]
        met = computed.max(axis=1, keepdims=True) if self._together else computed
        end = np.broadcast_to(met + work.inside_s / 2, computed.shape)  # as much forward as backward
        note(stage, kind, lane, start, computed)
        note(stage, "inside", lane, met, end)
        self._free[stage] = end
        target = stage + 1 if kind == "forward" else stage - 1
        if 0 <= target < len(self._stages):
            sent = np.maximum(end, self._link[stage])
            self._link[stage] = sent + self._send_s[min(stage, target)]
            note(stage, "send", lane, sent, self._link[stage])
            self._arrived[kind, target, lane] = self._link[stage]
        return start


def _exchange_gradients(work: StepWork, number: int, begin: Times, end: Times, diary: _Diary) -> Times:
    """Buckets along `data`, one after another, each when all replicas have it; gives when all have all."""
    ring, sharded = Ring(work.plan.data, work.plan.cells), work.plan.shard != "none"
    line, busy_s = np.zeros((len(end), 1)), 0.0
    for place, bucket in enumerate(work.stages[number].buckets):
        ready = begin + bucket.ready * (end - begin) if work.overlaps else end
        start = np.maximum(line, ready.max(axis=1, keepdims=True))
        line = start + bucket_s(work.cluster, ring, bucket, sharded)
        busy_s += bucket.busy_s
        diary.note(number, "exchange", place, start, line)
    return np.maximum(end + busy_s, line) if work.overlaps else np.maximum(end, line)


def _update(work: StepWork, number: int, start: Times, factor: Times, diary: _Diary) -> Times:
    """The optimizer, then the parameters that others along `data` updated."""
    stage = work.stages[number]
    end = start + stage.update_s * factor
    diary.note(number, "update", "", start, end)
    if not stage.gather_bytes:
        return end
    begin = end.max(axis=1, keepdims=True)
    gathered: Times = begin + gather_s(
        work.cluster, Ring(work.plan.data, work.plan.cells), stage.gather_bytes
    )
    diary.note(number, "gather", "", begin, gathered)
    return gathered
