"""A run dealt to workers by a plan: the mesh, this worker's stage, its share of the parameters."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from lockstep.comm.compress.feedback import Feedback
from lockstep.comm.everywhere import everywhere
from lockstep.comm.group import Group
from lockstep.comm.mesh import Mesh, make_mesh, plain_mesh
from lockstep.comm.tree import worker_lanes
from lockstep.data.loader import Lanes, Needs
from lockstep.errors import LockstepError
from lockstep.lower.lane_by_lane import LaneByLane
from lockstep.parallel.device_pipeline import DevicePipeline
from lockstep.parallel.mix.mix import Mix
from lockstep.parallel.mix.mixed_lanes import MixedLanes
from lockstep.parallel.pipeline import Pipeline, forget_values, keep_part
from lockstep.parallel.pipelined_lanes import PipelinedLanes
from lockstep.parallel.pipelined_stock import PipelinedStock
from lockstep.parallel.shard.gathered_model import GatheredModel, share_model
from lockstep.parallel.shard.sharded_model import ShardedModel, blocks_by_size
from lockstep.parallel.split.layer_report import tell_layers
from lockstep.parallel.split.split_graph import SplitGraph
from lockstep.parallel.stage_link import StageLink
from lockstep.runs.held_state import HeldParts
from lockstep.runs.kept_state import KeptState
from lockstep.runs.state_parts import StateParts
from lockstep.runs.train_state import TrainState
from lockstep.spec import Launch
from lockstep.spec.generation import Generation
from lockstep.spec.plan import Plan
from lockstep.spec.rule.loss_scale import begin_scale
from lockstep.spec.rule.optimizer_rule import RULES
from lockstep.train.evaluation.host_evaluate import Evaluator, averaged_weights
from lockstep.train.evaluation.pipelined_evaluate import stage_evaluator
from lockstep.train.parts.plan_parts import PlanParts, check_parts, find_plan_parts
from lockstep.train.preflight import explain_memory
from lockstep.train.setup import Given, Setup

if TYPE_CHECKING:
    from lockstep.parallel.products.dealt_products import DealtProducts


@dataclass
class Dealt:
    """What one worker computes of a run."""

    setup: Setup
    mesh: Mesh
    plan: Plan
    bucket_mb: float  # the size of blocks that are shared
    # also of one stage, whose parameters are gathered block by block
    pipeline: Pipeline | DevicePipeline | None = None
    split: SplitGraph | None = None  # if layers are over several workers
    products: DealtProducts | None = None  # the same with fused or compiled kernels
    mix: Mix | None = None  # if some layers are over the workers along data
    sharded: ShardedModel | None = None  # once the state has begun
    held: HeldParts | None = None  # what workers of the generation before had; None: all had all of the state
    kept: KeptState = field(default_factory=lambda: KeptState(0))  # copies the state between checkpoints
    later: dict[int, PlanParts] = field(default_factory=dict)  # by first epoch, if the batch grows

    def at(self, epoch: int) -> Dealt:
        """The same with the batch of an epoch."""
        first = max((begin for begin in self.setup.later if begin <= epoch), default=0)
        parts = vars(self.later[first]) if first in self.later else {}
        return replace(self, setup=self.setup.at(first), **parts) if first else self

    @property
    def needs(self) -> Needs:
        """What this worker needs of its samples."""
        stage = self.pipeline.position if self.pipeline else None
        return Needs(stage.is_first, stage.is_last) if stage else Needs()

    def lower(self, read: Callable[[], Lanes]) -> LaneByLane:
        """The model, or this worker's stage of it, made ready to run its lanes."""
        setup, pipeline, data = self.setup, self.pipeline, self.mesh.data
        if pipeline is None:
            if self.mix:
                assert self.sharded
                publish = self.sharded.publish
                return MixedLanes(setup.model, setup.loss, setup.run.seed, setup.half, self.mix, publish)
            lowered = setup.lower(read, data)
            lowered.split = self.split or lowered.split
            if setup.run.train.recompute and not setup.lowering:
                lowered.recompute()
            if self.products:
                from lockstep.lower.device_lanes import DeviceLanes

                assert isinstance(lowered, DeviceLanes)
                lowered.workers = self.products.workers
            lowered.hands_over = self.plan.shards_gradients and type(lowered) is LaneByLane
            return lowered
        link, seed = StageLink(self.mesh, setup.device), setup.run.seed
        staged: PipelinedLanes[Any]
        if isinstance(pipeline, DevicePipeline):
            from lockstep.parallel.pipelined_device import PipelinedDevice

            staged = PipelinedDevice(setup.model, seed, pipeline, link)
        else:
            staged = PipelinedStock(setup.model, setup.loss, seed, setup.half, pipeline, link)
            staged.split = self.split or setup.grid
        staged.hands_over = self.plan.shards_gradients
        if pipeline.gathered:
            lanes = setup.run.train.lanes
            staged.rounds = max(len(worker_lanes(lanes, data.size, rank)) for rank in range(data.size))
        return staged

    def evaluator(self, graph: bool) -> Evaluator:
        """Evaluation after every epoch, where workers of the same lane have different images."""
        pipeline, group = self.pipeline, self.mesh.stage
        if pipeline is None:
            return self.setup.evaluator(group, graph)
        stock, link = self.setup.stock_evaluator(group), StageLink(self.mesh, self.setup.device)
        return stage_evaluator(stock, pipeline, self.mesh.pipeline, link)

    def explain_memory(self) -> AbstractContextManager[None]:
        """Say what would help, if memory runs out."""
        setup, in_parts = self.setup, self.plan.cuts_model
        return explain_memory(setup.run, setup.device, bool(setup.lowering), in_parts)

    def begin(self) -> TrainState:
        """The state before the first step: this worker's part of it, if the plan splits it."""
        state, train = self._begin(), self.setup.run.train
        state.scale = begin_scale(train.precision, train.loss_scale)
        return state

    def _begin(self) -> TrainState:
        setup, plan, mesh = self.setup, self.plan, self.mesh
        options = setup.run.optimizer, setup.run.train.ema
        feedback = Feedback.of(setup.run.train, setup.model, mesh.data)
        if not plan.splits_state and not feedback:
            return TrainState.begin(setup.model, *options)
        if self.pipeline:
            keep_part(setup.model, self.pipeline.names)
        if self.mix:
            self.sharded = self.mix.share(setup.model)
        elif plan.shard != "none":
            gathers = self.pipeline if plan.shard == "parameters" else None
            names = (gathers.share if gathers else blocks_by_size)(setup.model, self.bucket_mb)
            uncut = bool(RULES[setup.run.optimizer.name].whole)
            self.sharded = share_model(setup.model, names, mesh.shard, plan, uncut)
            if gathers and isinstance(self.sharded, GatheredModel):
                gathers.gather(self.sharded)
                for parts in self.later.values():
                    assert parts.pipeline
                    parts.pipeline.share(setup.model, self.bucket_mb)
                    parts.pipeline.gather(self.sharded)
        share = self.sharded.share if self.sharded else None
        return TrainState.begin(setup.model, *options, StateParts(mesh.world, mesh.stage), share, feedback)

    @property
    def told(self) -> list[str]:
        """What each stage has, what of the layers is cut, how large the shares are: lines for people."""
        found = self.pipeline.told if self.pipeline and self.plan.pipeline > 1 else []
        found = [*found, tell_layers(self.split)] if self.split else found
        found = [*found, self.products.tell()] if self.products else found
        found = [*found, *self.mix.told] if self.mix else [*found, *self.kept.told]
        if not self.sharded or self.mix:
            return found
        share, count = self.sharded.share, self.mesh.shard.size // self.plan.replicas
        whole = sum(block.length for block in share.blocks)
        own = sum(len(flat) for flat in share.flats)
        kept = {"optimizer": "the optimizer's state", "gradients": "gradients and the optimizer's state"}
        what = kept.get(self.plan.shard, "values, gradients and the optimizer's state")
        line = f"of {whole / 1e6:.2f} M parameters worker 0 keeps {what} for {own / 1e6:.2f} M"
        return [*found, f"{line}: one of {count} shares"]

    def averaged(self, state: TrainState) -> AbstractContextManager[None]:
        """The model with its averaged weights, if the run keeps them."""
        if self.sharded:
            return self.sharded.averaged(state.averaged, state.ema)
        return averaged_weights(state.model, state.ema)

    def test(self, evaluate: Evaluator, state: TrainState) -> dict[str, Any]:
        """Evaluate the test images once, if the epochs were evaluated on a validation split.

        Tells too whether the run ended early.
        """
        run = self.setup.run
        early = run.evaluate.tell_stop(state.epoch, run.train.epochs)
        if self.setup.store.val is None:
            return early
        with self.averaged(state):
            found = replace(evaluate, split=self.setup.store.test)(state.model)
        tested = {"test_accuracy": found.accuracy, "test_loss": found.loss, "test_metrics": found.metrics}
        return early | {name: value for name, value in tested.items() if value not in (None, {})}

    def explain_state(self, state: TrainState, undone: int) -> str:
        """The plan, and from where a state that was in parts came, after workers were lost or joined."""
        plan = f"the plan is now {self.plan}" if self.setup.run.train.compress == "none" else ""
        source = self.held.explain(state.step, undone) if self.held else ""
        return ": ".join(filter(None, (plan, source)))

    def make_whole(self, state: TrainState) -> None:
        """Give every worker the whole model, at the end."""
        if state.parts:
            shared = state.share.shapes if state.share else {}
            state.parts.make_whole(state.model, state.pieces(), shared, self.setup.device)

    def close(self) -> None:
        """End what gathers parameters."""
        if self.sharded:
            self.sharded.close()


def deal(setup: Setup, launch: Launch, world: Group, generation: Generation | None = None) -> Dealt:
    """Deal a run by the plan for so many workers; every worker still has all of it. A collective."""
    halts = bool(generation and generation.halt)
    if halts and any(plan.splits_state for plan in launch.plans):
        left = f"{world.size} worker{'s' * (world.size > 1)} left"
        error = LockstepError(
            f"--plan {launch.plan} needs more than the {left}: --resume auto goes on from the last "
            "checkpoint, also under another plan; --or names one beforehand"
        )
        error.everywhere, error.exit_code = True, 143
        raise error
    plan = Plan() if halts else launch.plan_for(world.size, setup.run.train.lanes)
    if not plan.splits:  # as many workers as are left
        return Dealt(setup, plain_mesh(world), plan, launch.bucket_mb)
    return everywhere(world, lambda: _split(setup, plan, launch.bucket_mb, world))


def forget_part(setup: Setup | None, given: Given) -> Setup | None:
    """The setup for another generation, whose state comes from a checkpoint; None if it is built anew.

    A script's module cannot be built again, so it stays, with all of its memory.
    """
    if given.model is None or setup is None:
        return None
    forget_values(setup.model, setup.device)
    return setup


def _split(setup: Setup, plan: Plan, bucket_mb: float, world: Group) -> Dealt:
    check_parts(setup, plan)
    mesh = make_mesh(world, plan)
    parts = find_plan_parts(setup, plan, mesh)
    later = {first: find_plan_parts(setup.at(first), plan, mesh, parts) for first in setup.later}
    return Dealt(setup, mesh, plan, bucket_mb, **vars(parts), later=later)
