"""Goodput of a long run whose nodes fail: with our recovery, and with restarts from checkpoints.

Both meet the same failures, and write checkpoints at the same interval. A restart loses all since the last
one. Recovery redoes the step in which a node was lost, and goes on with the nodes that are left until another
takes its place. Goodput is the time of all useful steps, with all nodes, over the time of the run.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from lockstep.errors import SpecError
from lockstep.spec.field import accept_number

# benchmarks/results/recovery-cpu.json, 4 workers of one machine. A lost node is silent, as a frozen worker.
RECOVER_S = 0.18  # a killed worker, which the launcher sees at once, to the next step
DETECT_S = 1.28  # a frozen one, which its heartbeat shows, takes so much longer
RESTART_S = 14.2  # torchrun: a killed worker to the next step by its restart of all
_HOUR_S = 3600.0
_FAILURES = 2000  # that tell one interval from another
_MAY_BE_ZERO = ("checkpoint_s", "restart_s", "detect_s", "recover_s", "repair_s", "survive", "lanes")


@dataclass(frozen=True)
class FailingRun:
    """A run on nodes that fail now and then, each by itself."""

    step_s: float  # with all nodes
    nodes: int
    node_mtbf_hours: float  # mean time of a node between failures
    checkpoint_s: float = 30.0  # training stands still
    workers_a_node: int = 1
    lanes: int = 0  # 0: the smallest power of two that gives each worker one
    restart_s: float = RESTART_S
    detect_s: float = DETECT_S
    recover_s: float = RECOVER_S
    repair_s: float = 4 * _HOUR_S  # until another node takes the place of a lost one
    survive: float = 1.0  # share of losses after which somebody has all of the state
    days: float = 30.0

    def __post_init__(self) -> None:
        for item in fields(self):
            value, least = getattr(self, item.name), item.name in _MAY_BE_ZERO
            number = accept_number(item.name, value)
            if number < 0 or (number == 0 and not least):
                raise SpecError(f"{item.name}={value} must be {'0 or more' if least else 'above 0'}")
        for key in ("nodes", "workers_a_node", "lanes"):
            if not isinstance(getattr(self, key), int):
                raise SpecError(f"{key}={getattr(self, key)} must be a whole number")
        if self.nodes < 2:
            raise SpecError(f"nodes={self.nodes}: nobody survives the loss of the only node; give 2 or more")
        if self.survive > 1:
            raise SpecError(f"survive={self.survive} is a share: from 0 to 1")
        if self.lanes and self.lanes < self.workers:
            raise SpecError(f"lanes={self.lanes} for {self.workers} workers: each needs one lane or more")

    @property
    def workers(self) -> int:
        return self.nodes * self.workers_a_node

    @property
    def mtbf_s(self) -> float:
        """Mean time between failures of the run: any of its nodes."""
        return self.node_mtbf_hours * _HOUR_S / self.nodes

    @property
    def young_s(self) -> float:
        """The interval between checkpoints by Young's formula, the first order of Daly's."""
        return math.sqrt(2 * self.checkpoint_s * self.mtbf_s)

    def slowdown(self, nodes: int) -> float:
        """Of a step with so many nodes: by the lanes of the busiest worker."""
        lanes = self.lanes or 1 << (self.workers - 1).bit_length()
        return -(-lanes // (nodes * self.workers_a_node)) / -(-lanes // self.workers)

    def whole_steps(self, interval_s: float) -> float:
        """An interval of checkpoints as a whole number of steps."""
        return max(round(interval_s / self.step_s), 1) * self.step_s


@dataclass(frozen=True)
class Goodput:
    """Of one interval between checkpoints: of each of several runs, and their means."""

    interval_s: float
    restart_runs: tuple[float, ...]
    recovery_runs: tuple[float, ...]

    @property
    def restart(self) -> float:
        return sum(self.restart_runs) / len(self.restart_runs)

    @property
    def recovery(self) -> float:
        return sum(self.recovery_runs) / len(self.recovery_runs)


@dataclass(frozen=True)
class _Failure:
    time_s: float
    node: int
    luck: float  # 0 to 1


def simulate_run(
    run: FailingRun, intervals_s: Sequence[float], seed: int = 0, runs: int = 10
) -> list[Goodput]:
    """Goodput by interval, of some runs each, whose failures follow from (seed, number of the run)."""
    for interval in intervals_s:
        if not 0 < interval < math.inf:
            raise SpecError(f"interval_s={interval} must be above 0")
    if runs < 1 or seed < 0:
        raise SpecError(f"runs={runs}, seed={seed}: give 1 run or more, and a seed from 0")
    failures = [_draw_failures(run, random.Random(f"{seed}/{number}")) for number in range(runs)]
    rows = []
    for interval in dict.fromkeys(map(run.whole_steps, intervals_s)):
        restart = [_restart_goodput(run, interval, [one.time_s for one in times]) for times in failures]
        recovery = [_recovery_goodput(run, interval, times) for times in failures]
        rows.append(Goodput(interval, tuple(restart), tuple(recovery)))
    return rows


def find_interval(run: FailingRun, seed: int = 0, runs: int = 10) -> Goodput:
    """The best interval for restarts, of many around Young's, in runs that are long enough to tell."""
    tried = [run.young_s * 2 ** (power / 4) for power in range(-8, 9)] if run.young_s else [run.step_s]
    days = _FAILURES * run.mtbf_s / runs / (24 * _HOUR_S)
    long = replace(run, days=max(run.days, days))
    return max(simulate_run(long, tried, seed, runs), key=lambda row: row.restart)


def expect_goodput(run: FailingRun, interval_s: float) -> float:
    """Goodput of restarts in closed form (Daly): failures that come at any time, in a restart too."""
    rate = 1 / run.mtbf_s
    exponent = rate * (run.restart_s + interval_s + run.checkpoint_s)
    if exponent > 500:  # nothing is ever finished
        return 0.0
    wall_s = (math.exp(exponent) - math.exp(rate * run.restart_s)) / rate
    return interval_s / wall_s


def _draw_failures(run: FailingRun, source: random.Random) -> list[_Failure]:
    """All failures of all nodes; which of them hit a node that works is found later."""
    horizon, time, found = run.days * 24 * _HOUR_S, 0.0, []
    while (time := time + source.expovariate(1.0) * run.mtbf_s) < horizon:
        found.append(_Failure(time, source.randrange(run.nodes), source.random()))
    return found


def _restart_goodput(run: FailingRun, interval_s: float, failures_s: Sequence[float]) -> float:
    """Every failure loses what is after the last checkpoint; a spare node is always at hand."""
    horizon, segment = run.days * 24 * _HOUR_S, interval_s + run.checkpoint_s
    useful, begin = 0.0, 0.0
    for time in (*failures_s, horizon):
        whole, rest = divmod(max(time - begin, 0.0), segment)
        useful += whole * interval_s
        if time == horizon:
            useful += min(rest, interval_s)
        begin = time + run.restart_s
    return useful / horizon


def _recovery_goodput(run: FailingRun, interval_s: float, failures: Sequence[_Failure]) -> float:
    """A failure costs detection, recovery and the step; then fewer nodes go on."""
    horizon, state = run.days * 24 * _HOUR_S, _Recovered(run, interval_s)
    for failure in failures:
        state.repair(failure.time_s)
        state.lose(failure)
    state.repair(horizon)
    state.go_on(horizon)
    return state.useful_s / horizon


class _Recovered:
    """A run that goes on with the nodes that are left."""

    def __init__(self, run: FailingRun, interval_s: float) -> None:
        self._run, self._interval_s = run, interval_s
        self._kept_s = 0.0  # useful, up to the last checkpoint
        self._done_s = 0.0  # useful, since then
        self._saving_s = 0.0  # of the checkpoint that is being written
        self._time_s = 0.0
        self._down: deque[tuple[float, int]] = deque()  # when each is replaced, in order

    @property
    def useful_s(self) -> float:
        return self._kept_s + self._done_s

    @property
    def _nobody(self) -> bool:
        return len(self._down) == self._run.nodes

    def go_on(self, time_s: float) -> None:
        """Compute and save until then; nothing happens in a recovery."""
        if time_s <= self._time_s or self._nobody:
            return
        slow = self._run.slowdown(self._run.nodes - len(self._down))
        segment = self._interval_s * slow + self._run.checkpoint_s
        place = self._done_s * slow + self._saving_s + time_s - self._time_s
        whole, rest = divmod(place, segment)
        self._kept_s += whole * self._interval_s
        self._done_s = min(rest / slow, self._interval_s)
        self._saving_s = max(rest - self._interval_s * slow, 0.0)
        self._time_s = time_s

    def repair(self, time_s: float) -> None:
        """Nodes that come back until then."""
        while self._down and self._down[0][0] <= time_s:
            back_s = self._down[0][0]
            self.go_on(back_s)
            pause_s = self._run.restart_s if self._nobody else self._run.recover_s
            self._down.popleft()
            self._time_s = max(self._time_s, back_s + pause_s)

    def lose(self, failure: _Failure) -> None:
        """One node; it may be down already."""
        run = self._run
        if any(node == failure.node for _, node in self._down):
            return
        self.go_on(failure.time_s)
        self._down.append((failure.time_s + run.repair_s, failure.node))
        if self._nobody or failure.luck >= run.survive:
            self._done_s, pause_s = 0.0, run.restart_s
        else:
            self._done_s = math.floor(self._done_s / run.step_s + 1e-9) * run.step_s
            pause_s = run.recover_s
        self._saving_s = 0.0
        self._time_s = max(self._time_s, failure.time_s + run.detect_s + pause_s)
