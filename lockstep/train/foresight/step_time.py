"""Seconds of whole steps of a run as one worker trains it, and of its optimizer's update alone."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import islice

import torch

from lockstep.comm.group import Group
from lockstep.spec import Launch
from lockstep.train.dealt import deal
from lockstep.train.engine import Engine
from lockstep.train.result import StepResult
from lockstep.train.setup import Setup
from lockstep.train.update.state_update import update_state

_FIRST = 2  # steps that are not counted: memory is allocated, kernels are looked up


@dataclass(frozen=True)
class StepTimes:
    """Seconds of each step, and the median of an update of all parameters."""

    each_s: tuple[float, ...]
    update_s: float

    @property
    def median_s(self) -> float:
        return statistics.median(self.each_s)


def time_steps(setup: Setup, launch: Launch, steps: int) -> StepTimes:
    """Train some steps of a run that has been set up; the weights change."""
    dealt = deal(setup, launch, Group())
    state = dealt.begin()
    per_epoch = len(setup.store.train) // setup.run.train.batch
    with closing(Engine(dealt, state, launch)) as engine:

        def epochs() -> Iterator[StepResult]:
            while True:
                yield from engine.epoch(lambda step: False, lambda: (False, False))
                state.epoch, state.step_in_epoch = state.epoch + 1, 0

        times, last = [], time.perf_counter()
        for result in islice(epochs(), _FIRST + steps):
            now = time.perf_counter()
            if not (state.step_in_epoch == 1 and per_epoch > 1):  # an epoch's first step also opens it
                times.append(result.seconds or now - last)
            last = now
        update_s = _time_update(setup) if setup.lowering is None else 0.0
    return StepTimes(tuple(times[_FIRST:] or times), update_s)


@torch.no_grad()
def _time_update(setup: Setup, rounds: int = 5) -> float:
    """The optimizer's rule on all parameters, which are restored."""
    from lockstep.runs.train_state import TrainState

    own = TrainState.begin(setup.model, setup.run.optimizer, setup.run.train.ema)
    params = own.trained()
    kept = [p.clone() for p in params.values()]
    grads = {name: torch.full_like(p, 1e-4) for name, p in params.items()}
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        update_state(own, 1, [1e-6] * len(own.groups), grads)
        times.append(time.perf_counter() - start)
    for param, value in zip(params.values(), kept, strict=True):
        param.copy_(value)
    return statistics.median(times)
