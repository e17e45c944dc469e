"""What a plan that splits the model makes of it: this worker's stage, layers and products over workers.

Probes try it at the shapes of a lane, so a batch that grows has it anew for each size, with the same cuts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lockstep.comm.mesh import Mesh
from lockstep.comm.tree import worker_lanes
from lockstep.errors import ModelError
from lockstep.lower.fixed_lane import fixed_images
from lockstep.parallel.device_pipeline import DevicePipeline, cut_program
from lockstep.parallel.mix.mix import Mix
from lockstep.parallel.pipeline import Pipeline, cut_model
from lockstep.parallel.split.axes import Axes
from lockstep.parallel.split.split_graph import SplitGraph
from lockstep.parallel.split.split_model import split_model
from lockstep.spec.plan import Plan
from lockstep.spec.plan_check import check_slices, explain_kernels, explain_scale, is_in_parts
from lockstep.spec.rule.loss_scale import PRECISION
from lockstep.train.setup import Setup

if TYPE_CHECKING:
    from lockstep.parallel.products.dealt_products import DealtProducts


@dataclass
class PlanParts:
    """All that depends on the samples of a lane."""

    # also of one stage, whose parameters are gathered block by block
    pipeline: Pipeline | DevicePipeline | None = None
    split: SplitGraph | None = None  # if layers are over several workers
    products: DealtProducts | None = None  # the same with fused or compiled kernels
    mix: Mix | None = None  # if some layers are over the workers along data


def check_parts(setup: Setup, plan: Plan) -> None:
    """Refuse a plan that the run's kernels or data cannot be split by."""
    in_parts = is_in_parts(plan)
    if setup.lowering and setup.metrics and in_parts:
        raise ModelError(
            f"--plan {plan}: not with {setup.lowering.program.kernels} kernels, as metrics need "
            "the outputs of stock kernels: use kernels.set=stock, which is another run"
        )
    if setup.lowering and setup.store.eval_shape != setup.store.shape and in_parts:
        raise ModelError(
            f"--plan {plan}: not with data.eval_size={setup.store.eval_size} and "
            f"{setup.lowering.program.kernels} kernels, whose parts are of one size: leave data.eval_size "
            "out, or use kernels.set=stock, which is another run"
        )
    if setup.lowering and plan.spatial > 1:
        raise ModelError(explain_kernels(plan, setup.lowering.program.kernels))
    train = setup.run.train
    if train.precision == PRECISION and setup.lowering and in_parts:
        raise ModelError(explain_scale(plan, setup.lowering.program.kernels))


def find_plan_parts(setup: Setup, plan: Plan, mesh: Mesh, first: PlanParts | None = None) -> PlanParts:
    """The parts of a run with one batch; cut where those of its `first` batch are. A collective."""
    found, stage = PlanParts(), None
    train, images = setup.run.train, fixed_images(setup.run, setup.store.shape, setup.device)
    if plan.splits_layers and not setup.lowering:
        axes = Axes(train.bands, train.slices, mesh.channel, mesh.spatial)
        found.split = split_model(setup.model, axes, images, setup.half, setup.grid)
    if plan.layers:
        check_slices(plan, plan.data, setup.run)
        assert setup.grid
        found.mix = Mix(setup.grid, plan, train, mesh.shard)
    known = first.pipeline if first else None
    if isinstance(known, DevicePipeline):
        assert setup.lowering
        found.pipeline = stage = replace(known, whole=setup.lowering)
    elif known:
        found.pipeline = known.recut(setup.model, images, setup.half, found.split or setup.grid)
    elif is_in_parts(plan) and setup.lowering:
        found.pipeline = stage = cut_program(setup.model, setup.lowering, images, plan, mesh)
    elif is_in_parts(plan):
        both = images, fixed_images(setup.run, setup.store.eval_shape, setup.device)
        found.pipeline = cut_model(setup.model, both, setup.half, plan, mesh, found.split or setup.grid)
    if plan.splits_layers and setup.lowering:
        from lockstep.parallel.products.dealt_products import deal_products

        own = worker_lanes(train.lanes, mesh.data.size, mesh.data.rank)
        found.products = deal_products(setup.lowering, own, mesh, stage)
        if stage:
            stage.workers = found.products.workers
    return found
