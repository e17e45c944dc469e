"""Predicts the steps of a run for several numbers of workers, for what is measured beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lockstep.cli.foresight.counted_profile import read_own_profile
from lockstep.spec import Launch, Run
from lockstep.spec.cluster import Cluster
from lockstep.spec.profile import Profile


def predict_steps(runs: Sequence[tuple[Run, int]], cluster: Cluster, profile: Profile) -> list[float]:
    """Seconds of a step of each run by so many workers, with data alone."""
    from lockstep.planner.cost import predict
    from lockstep.planner.deal_work import deal_work
    from lockstep.spec.plan import Plan

    return [predict(deal_work(run, profile, cluster, Plan(data=count))).total_s for run, count in runs]


def read_or_measure(path: Path | None, run: Run, device: str) -> Profile:
    """From a file, or measured here and now."""
    if path:
        return read_own_profile(path, run)
    from lockstep.cli.foresight.profile import say
    from lockstep.kernels.numerics import plain_torch
    from lockstep.train.foresight.measured_profile import ProfileOptions, measure_profile

    with plain_torch():
        return measure_profile(run, Launch(device=device), ProfileOptions(), say)
