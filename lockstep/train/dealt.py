"""A run dealt to workers by a plan: the mesh, and with a pipeline this worker's stage of the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from lockstep.comm.everywhere import everywhere
from lockstep.comm.group import Group
from lockstep.comm.mesh import Mesh, make_mesh
from lockstep.data.loader import Lanes, Needs
from lockstep.errors import LockstepError, ModelError
from lockstep.lower.fixed_lane import fixed_values
from lockstep.lower.lane_by_lane import LaneByLane
from lockstep.parallel.device_pipeline import DevicePipeline, cut_program
from lockstep.parallel.pipeline import Pipeline, cut_model, forget_values, keep_part
from lockstep.parallel.pipelined_stock import PipelinedStock
from lockstep.parallel.stage_link import StageLink
from lockstep.parallel.stage_parts import StageParts
from lockstep.runs.train_state import TrainState
from lockstep.spec.generation import Generation
from lockstep.spec.plan import Plan
from lockstep.train.evaluation.host_evaluate import Evaluator
from lockstep.train.evaluation.pipelined_evaluate import PipelinedDeviceEvaluator, PipelinedEvaluator
from lockstep.train.setup import Given, Setup


@dataclass(frozen=True)
class Dealt:
    """What one worker computes of a run."""

    setup: Setup
    mesh: Mesh
    parts: StageParts | None = None
    pipeline: Pipeline | DevicePipeline | None = None

    @property
    def needs(self) -> Needs:
        """What this worker needs of its samples."""
        stage = self.pipeline.position if self.pipeline else None
        return Needs(stage.is_first, stage.is_last) if stage else Needs()

    def lower(self, read: Callable[[], Lanes]) -> LaneByLane:
        """The model, or this worker's stage of it, made ready to run its lanes."""
        setup, pipeline = self.setup, self.pipeline
        if pipeline is None:
            return setup.lower(read, self.mesh.data)
        link = StageLink(self.mesh.pipeline, setup.device)
        if isinstance(pipeline, Pipeline):
            return PipelinedStock(setup.model, setup.loss, setup.run.seed, setup.bf16, pipeline, link)
        from lockstep.parallel.pipelined_device import PipelinedDevice

        return PipelinedDevice(setup.model, setup.run.seed, pipeline, link)

    def evaluator(self, graph: bool) -> Evaluator:
        """Evaluation after every epoch."""
        pipeline, stages = self.pipeline, self.mesh.pipeline
        if pipeline is None:
            return self.setup.evaluator(self.mesh.data, graph)
        stock = {**vars(self.setup.stock_evaluator(self.mesh.data)), "stages": stages}
        stock["link"] = StageLink(stages, self.setup.device)
        if isinstance(pipeline, Pipeline):
            return PipelinedEvaluator(**stock, pipeline=pipeline)
        network, load = pipeline.lowering.eval_network(1)
        return PipelinedDeviceEvaluator(**stock, network=network, load=load)

    def take_part(self, state: TrainState) -> None:
        """Keep only this worker's part of the state, and free the rest."""
        if self.parts and self.pipeline:
            state.take_part(self.parts, partial(keep_part, names=self.pipeline.names))

    def make_whole(self, state: TrainState) -> None:
        """Give every worker the whole model, at the end."""
        if self.parts:
            own = {k.removeprefix("model."): v for k, v in state.named().items() if k.startswith("model.")}
            self.parts.make_whole(state.model, own, self.setup.device)
            state.parts = None


def deal(setup: Setup, plan: Plan, world: Group, generation: Generation | None = None) -> Dealt:
    """Deal a run by a plan; every worker still has all of it. A collective."""
    if not plan.splits_model:
        return Dealt(setup, Mesh(world, world))  # as many workers as are left
    if generation and generation.halt:
        error = LockstepError(
            f"{world.size} workers are too few for --plan {plan}: the same command with --resume auto goes "
            "on from the last checkpoint"
        )
        error.everywhere = True
        raise error
    return everywhere(world, lambda: _split(setup, plan, world))


def forget_part(setup: Setup | None, given: Given) -> Setup | None:
    """The setup for another generation, whose state comes from a checkpoint; None if it is built anew.

    A script's module cannot be built again, so it stays, with all of its memory.
    """
    if given.model is None or setup is None:
        return None
    forget_values(setup.model, setup.device)
    return setup


def _split(setup: Setup, plan: Plan, world: Group) -> Dealt:
    mesh, images = make_mesh(world, plan), _fixed_images(setup)
    pipeline: Pipeline | DevicePipeline
    if setup.lowering and setup.metrics:
        raise ModelError(
            f"--plan {plan}: metrics of your own need the outputs of stock kernels, and the stages have "
            f"{setup.lowering.program.kernels} ones: use kernels.set=stock, which is another run"
        )
    if setup.lowering:
        pipeline = cut_program(setup.model, setup.lowering, images, plan, mesh)
    else:
        pipeline = cut_model(setup.model, images, setup.bf16, plan, mesh)
    return Dealt(setup, mesh, StageParts(mesh), pipeline)


def _fixed_images(setup: Setup) -> torch.Tensor:
    """A lane of fixed images, in the memory format of training."""
    train, shape = setup.run.train, setup.store.shape
    empty = torch.empty(train.batch // train.lanes, *shape, device=setup.device)
    fixed = empty.to(memory_format=setup.memory_format)
    return fixed.copy_(fixed_values("images", fixed))
