"""A trained run dealt to workers by a plan: each reads its own part of the weights, and nobody has all of it.

It evaluates and predicts what does not fit one worker.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lockstep.comm.everywhere import everywhere
from lockstep.comm.group import Group
from lockstep.comm.mesh import make_mesh
from lockstep.data import Split
from lockstep.kernels.loss import Loss
from lockstep.kernels.numerics import half_precision, half_type
from lockstep.models.tensors import replace_tensors
from lockstep.parallel.device_pipeline import DevicePipeline, cut_program
from lockstep.parallel.pipeline import Pipeline, cut_for_evaluation
from lockstep.parallel.shard.gathered_model import GatheredModel
from lockstep.parallel.stage_link import StageLink
from lockstep.parallel.stage_turn import StageTurns
from lockstep.runs.trained_run import Trained
from lockstep.spec.plan import Plan
from lockstep.train.evaluation.evaluate import (
    lower_trained,
    place_evaluator,
    prepared,
    stock_evaluator,
)
from lockstep.train.evaluation.host_evaluate import Evaluation
from lockstep.train.evaluation.metric import Metrics
from lockstep.train.evaluation.pipelined_evaluate import stage_evaluator


class DealtRun:
    """One worker's part of a trained run, which was opened without its weights; calls are collectives.

    Images come in batches of `batch`. With a loss to evaluate by, a run that trained with fused or compiled
    kernels has these; without one it has stock kernels.
    """

    def __init__(
        self,
        trained: Trained,
        plan: Plan,
        world: Group,
        *,
        batch: int,
        loss: Loss | None = None,
        bucket_mb: float = 25.0,
    ) -> None:
        plan = replace(plan.for_workers(world.size).folded, cost="counted")
        self._trained, self._batch, self._loss = trained, batch, loss
        self._mesh = make_mesh(world, plan)
        self._link = StageLink(self._mesh, trained.device)
        self._gathered: GatheredModel | None = None
        with prepared(trained):
            whole = loss if not trained.run.evaluate.metrics else None  # which need the outputs
            self._lowering = lower_trained(trained, whole) if whole else None
            self._pipeline = everywhere(world, lambda: self._cut(plan))
            everywhere(world, lambda: self._load(plan, bucket_mb))

    def evaluate(self, split: Split, metrics: Metrics | None = None) -> Evaluation:
        """Loss, accuracy and metrics on a split: the same bits under any plan."""
        trained, pipeline = self._trained, self._pipeline
        assert self._loss, "made to predict"
        with prepared(trained):
            stock = stock_evaluator(trained, split, self._loss, metrics, self._mesh.data)
            if pipeline is None:
                return place_evaluator(stock, self._lowering)(trained.model)
            return stage_evaluator(stock, pipeline, self._mesh.pipeline, self._link)(trained.model)

    @torch.no_grad()
    def predict(self, images: Tensor) -> Tensor:
        """What `Predictor` gives for a batch, a row for each image; it folds no batch norms, though."""
        trained, stages = self._trained, self._mesh.pipeline
        with prepared(trained), half_precision(trained.device, half_type(trained.run.train.precision)):
            normal = trained.augment.normalize(images.to(trained.device))
            outputs = self._compute(normal.contiguous(memory_format=trained.memory_format))
            found = torch.zeros(len(images), len(trained.classes), device=trained.device)
            if outputs is not None:
                found.copy_(trained.answer(outputs))
        self._link.flush()
        stages.broadcast(found, stages.size - 1)
        return found

    def close(self) -> None:
        """End the threads that send, receive and gather."""
        self._link.close()
        if self._gathered:
            self._gathered.close()

    def _compute(self, images: Tensor) -> Any:
        """What the model gives, at the last stage."""
        if self._pipeline is None:
            return self._trained.model(images)
        assert isinstance(self._pipeline, Pipeline)
        stage, gathered = self._pipeline.evaluation, self._gathered
        if gathered:
            gathered.begin(stage.block_uses)
        turns = StageTurns(stage, self._link, self._pipeline.draws, self._trained.device)
        arriving = turns.expect(1)
        found = turns.forward([images] if stage.is_first else arriving[0].result()).result
        if gathered:
            gathered.use_nothing()
        return found

    def _cut(self, plan: Plan) -> Pipeline | DevicePipeline | None:
        """This worker's stage; None if every worker has the whole model."""
        trained = self._trained
        if plan.pipeline == 1 and plan.shard != "parameters":
            return None
        images = torch.zeros(self._batch, *trained.shape, device=trained.device)
        images = images.contiguous(memory_format=trained.memory_format)
        if self._lowering:
            return cut_program(trained.model, self._lowering, images.to("meta"), plan, self._mesh)
        half = half_type(trained.run.train.precision)
        return cut_for_evaluation(trained.model, images, half, plan, self._mesh)

    @torch.no_grad()
    def _load(self, plan: Plan, bucket_mb: float) -> None:
        """Read this worker's part of the weights; what is gathered when it is used is cut into shares."""
        trained, device, pipeline = self._trained, self._trained.device, self._pipeline
        model, weights = trained.model, trained.weights
        every: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        names = {id(tensor): name for name, tensor in every.items()}
        mine = pipeline.names if pipeline else every.keys()
        params = dict(model.named_parameters())
        shares = plan.shard == "parameters"
        strides = {name: p.stride() for name, p in params.items() if shares and p.requires_grad}

        def choose(_: str, tensor: Tensor) -> Tensor:
            name = names[id(tensor)]
            if name not in mine:
                return torch.empty_like(tensor, device="meta")
            if name in strides:
                return torch.zeros((), dtype=tensor.dtype, device=device).expand(tensor.shape)
            return torch.empty_like(tensor, device=device).copy_(weights[name])

        replace_tensors(model, choose)
        if shares:
            assert pipeline
            values, blocks = _Placed(weights, strides, device), pipeline.share(model, bucket_mb)
            self._gathered = GatheredModel(model, blocks, self._mesh.shard, plan.replicas, values)
            pipeline.gather(self._gathered)


class _Placed(Mapping[str, Tensor]):
    """Tensors of a file on the device, with the strides they have in the model; read when asked for."""

    def __init__(
        self, source: Mapping[str, Tensor], strides: Mapping[str, tuple[int, ...]], device: torch.device
    ) -> None:
        self._source, self._strides, self._device = source, strides, device

    def __getitem__(self, name: str) -> Tensor:
        found = self._source[name]
        empty = torch.empty_strided(found.shape, self._strides[name], dtype=found.dtype, device=self._device)
        return empty.copy_(found)

    def __iter__(self) -> Iterator[str]:
        return iter(self._strides)

    def __len__(self) -> int:
        return len(self._strides)
