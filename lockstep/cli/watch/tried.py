"""The lines that a dry run prints: what every worker took, what was predicted, how long the run will take."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lockstep.runs.event import Tried


def describe_try(event: Tried) -> Iterator[str]:
    """One line after another."""
    train, workers = event.run.train, event.workers
    plan = f", plan {workers[0]['plan']}" if workers[0]["plan"] else ""
    yield (
        f"dry run of {event.model} ({event.num_params:,} parameters) on {event.data}: batch {train.batches} "
        f"in {train.lanes} lanes, {train.precision}, {event.kernels} kernels, "
        f"{_count(len(workers), 'worker')}{plan}; identity {event.identity[:12]}"
    )
    for worker in workers:
        yield _describe_worker(worker)
    taken = max(worker["taken_bytes"] for worker in workers)
    slowest = max(worker["step_s"] or worker["first_s"] for worker in workers)
    if event.predicted:
        yield (
            f"predicted: {_seconds(event.predicted['step_s'])} a step, from {event.predicted_from}; "
            f"measured: {_seconds(slowest)}"
        )
    else:
        yield "predicted: no time, since this machine was not probed: `lockstep probe` measures it"
    if event.predicted_bytes:
        unaware = ", without train.recompute" if train.recompute else ""
        yield (
            f"predicted: {_mb(event.predicted_bytes)} for weights, gradients, optimizer and activations of "
            f"the worker that needs the most{unaware}; measured: {_mb(taken)}"
        )
    epoch, rest = event.steps[0], sum(event.steps)
    more = ", if the larger batches of later epochs took no longer" if len(train.stages) > 1 else ""
    yield (
        f"so an epoch of {_count(epoch, 'step')} takes about {_long(epoch * slowest)} and the run of "
        f"{_count(rest, 'step')} {_long(rest * slowest)}{more}, evaluation left out"
    )
    yield (
        f"a checkpoint is {_mb(event.state_bytes)}; while it is written beside training, its copy takes as "
        "much host memory"
    )


def _describe_worker(worker: dict[str, Any]) -> str:
    first, last = worker["lanes"]
    lanes = f"lane {first}" if first == last else f"lanes {first} to {last}"
    stage = "" if worker["stage"] is None else f"stage {worker['stage']}, "
    after = f", the next {_seconds(worker['step_s'])}" if worker["step_s"] is not None else ""
    parts = ("waiting for data", worker["data_s"]), ("for other workers", worker["exchange_s"])
    waited = ", ".join(f"{_seconds(value)} {what}" for what, value in parts if value)
    return (
        f"worker {worker['worker']} on {worker['host']} ({worker['device']}), {stage}{lanes}: built in "
        f"{_seconds(worker['built_s'])}, the first step {_seconds(worker['first_s'])}{after}"
        f"{f' ({waited})' if waited else ''}; {_mb(worker['peak_bytes'])} at its peak, of which "
        f"{_mb(worker['taken_bytes'])} for the model and its steps"
    )


def _mb(size: float) -> str:
    return f"{size / 1e6:,.1f} MB"


def _seconds(value: float) -> str:
    return f"{value:.3f} s" if value >= 0.1 else f"{1000 * value:.1f} ms"


def _long(value: float) -> str:
    minutes, seconds = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return (
        f"{hours}:{minutes:02}:{seconds:02}"
        if hours
        else f"{minutes}:{seconds:02}"
        if minutes
        else f"{value:.1f} s"
    )


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"
