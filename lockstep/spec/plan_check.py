"""Refuses plans that a run or the number of workers is not made for, before anything starts."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.errors import SpecError
from lockstep.spec.plan import AXES, Plan
from lockstep.spec.rule.loss_scale import PRECISION
from lockstep.spec.rule.optimizer_rule import RULES
from lockstep.spec.run import Run


def check_plans(plans: Sequence[Plan], run: Run, size: int | str | None) -> None:
    """Refuse a plan, or one of those to fall back to after it, that does not go with a run of `size` workers.

    Whether the first plan comes out for as many is for the caller: on several nodes it is not known yet.
    """
    first, *fallbacks = plans
    check_layers(first, "--plan", run)
    check_slices(first, first.data or (size // first.least if isinstance(size, int) else 0), run)
    for plan in fallbacks:
        check_layers(plan, "--or", run)
        if plan.data > run.train.lanes or (isinstance(size, int) and not plan.most(size)):
            raise SpecError(
                f"--or {plan} needs {plan.workers or plan.least} workers and {plan.data or 1} lanes, and "
                f"there are {size} workers and {run.train.lanes} lanes: name a plan for fewer"
            )


def check_layers(plan: Plan, flag: str, run: Run) -> None:
    """Refuse rows or channels over workers where the run's bits would not be the same, or nothing does it.

    And every plan beside compression and local steps, which need whole gradients and weights; parts of a
    model beside what needs all of it, or another shape.
    """
    if plan.splits and run.train.compress != "none":
        raise SpecError(
            f"{flag} {plan}: not with train.compress={run.train.compress}, which needs all of a lane's "
            "gradients at one worker: deal the data alone (--workers), or set train.compress=none, "
            "which is another run"
        )
    if plan.splits and run.train.local_steps > 1:
        raise SpecError(
            f"{flag} {plan}: not with train.local_steps={run.train.local_steps}, in which each lane has "
            "whole weights of its own for some steps: deal the data alone (--workers), or set "
            "train.local_steps=1, which is another run"
        )
    if run.train.recompute and plan.cuts_model:
        raise SpecError(
            f"{flag} {plan}: not with train.recompute=true, as a block that is computed again must have all "
            "it needs in one worker: leave it out, or deal the data alone (--workers, shard=gradients)"
        )
    if run.data.options.get("sizes") and (plan.splits_model or plan.shard == "parameters"):
        raise SpecError(
            f"{flag} {plan}: not with data.sizes, as the parts of a model are cut for images of one size: "
            "deal the data alone (--workers)"
        )
    if run.train.growth and plan.layers:
        raise SpecError(
            f"{flag} {plan}: not with train.batch={run.train.batches}, as each worker keeps the rows of a "
            "layer that were proven for lanes of one size: leave layers out, or keep one batch"
        )
    if run.kernels.set in ("fused", "compiled"):
        if plan.spatial > 1 or plan.layers:
            raise SpecError(explain_kernels(plan, run.kernels.set, flag))
        if run.train.precision == PRECISION and is_in_parts(plan):
            raise SpecError(explain_scale(plan, run.kernels.set, flag))
    if plan.spatial > run.train.bands:
        bands = 1 << (plan.spatial - 1).bit_length()
        raise SpecError(
            f"{flag} {plan}: rows over {plan.spatial} workers need sums over pixels in a grid of as many "
            f"bands: set train.bands={bands}, which is part of the identity"
        )
    if plan.layers and RULES[run.optimizer.name].whole:
        raise SpecError(
            f"{flag} {plan}: optimizer.name={run.optimizer.name} looks at whole parameters, and layers deals "
            "their rows to workers: use shard=optimizer instead, or another optimizer, which is another run"
        )
    check_slices(plan, plan.data, run, flag)
    if 1 < run.train.slices < plan.channel:
        slices = 1 << (plan.channel - 1).bit_length()
        raise SpecError(
            f"{flag} {plan}: outputs over {plan.channel} workers, and the grid of their sums has "
            f"train.slices={run.train.slices}: set train.slices={slices}, or 1 for no such grid; "
            "either is another run"
        )
    if (plan.splits_layers or plan.layers) and run.train.sync_norm:
        raise SpecError(
            f"{flag} {plan}: train.sync_norm=true needs all of a layer at once: use train.sync_norm=false, "
            "which is another run, or a plan without spatial, channel and layers"
        )


def check_slices(plan: Plan, data: int, run: Run, flag: str = "--plan") -> None:
    """Refuse layers over more workers than a data gradient has partial sums for."""
    if plan.layers and data > run.train.slices:
        slices = 1 << (data - 1).bit_length()
        raise SpecError(
            f"{flag} {plan}: layers over {data} workers need their data gradients summed in as many slices: "
            f"set train.slices={slices}, which is part of the identity"
        )


def is_in_parts(plan: Plan) -> bool:
    """Whether a worker computes the model block by block."""
    return plan.pipeline > 1 or plan.shard == "parameters"


def explain_scale(plan: Plan, kernels: str, flag: str = "--plan") -> str:
    """Why such a plan does not go with fp16 and these kernels."""
    return (
        f"{flag} {plan}: not with train.precision={PRECISION} and {kernels} kernels, whose parts do not know "
        "the scale of the loss: use train.precision=bf16 or kernels.set=stock, which are other runs"
    )


def explain_kernels(plan: Plan, kernels: str, flag: str = "--plan") -> str:
    """Why a plan does not go with these kernels."""
    if plan.spatial > 1:
        return (
            f"{flag} {plan}: {kernels} kernels sum over all pixels at once, and spatial needs a sum for each "
            "band: use channel instead, or kernels.set=stock, which is another run"
        )
    return (
        f"{flag} {plan}: {kernels} kernels compute whole layers only: use kernels.set=stock, which is "
        "another run"
    )


def explain_lanes(plan: Plan, run: Run) -> str:
    """The largest number of workers that have something to do, as a product."""
    more = (f" × {axis}={getattr(plan, axis)}" for axis in AXES[1:] if getattr(plan, axis) > 1)
    return f"train.lanes={run.train.lanes}{''.join(more)}"
