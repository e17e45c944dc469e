"""Builds everything before the first step: data, model, kernels, identity.

Bad input is found here, before a directory is made or a step computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from lockstep.comm.group import Group
from lockstep.data import Store, open_data
from lockstep.data.augment import Augment, check_augment, make_augment
from lockstep.data.changes.own_change import OwnFunction
from lockstep.data.images.explain_cache import explain_cache
from lockstep.data.images.size_stage import SizeStages
from lockstep.data.loader import Lanes
from lockstep.data.map_style import from_map_style
from lockstep.data.store import check_batch
from lockstep.errors import ModelError
from lockstep.kernels.loss import Loss, WholeLoss, plain_loss
from lockstep.kernels.numerics import half_type, memory_format, to_device
from lockstep.kernels.one_pass_update import explain_update
from lockstep.lower.choose import Sample, lower_for_host
from lockstep.lower.lane_by_lane import LaneByLane
from lockstep.lower.local_lanes import LocalLanes
from lockstep.lower.program import DeviceLowering
from lockstep.measure.machine_fingerprint import fingerprint
from lockstep.models.source_hash import describe_loss
from lockstep.parallel.split.split_graph import SplitGraph
from lockstep.runs.about import About
from lockstep.spec import Run
from lockstep.spec.identity import Identity, is_scripted, make_identity
from lockstep.train.evaluation.eval_shape import check_eval_shape, check_sizes, lower_for_evaluation
from lockstep.train.evaluation.evaluate import place_evaluator
from lockstep.train.evaluation.host_evaluate import Evaluator
from lockstep.train.evaluation.metric import Metrics
from lockstep.train.evaluation.named_metric import find_metrics
from lockstep.train.parts.batch_parts import BatchParts, find_batch_parts, later_facts
from lockstep.train.parts.chosen_loss import choose_loss, explain_no_accuracy
from lockstep.train.parts.codec_facts import describe_codecs
from lockstep.train.parts.kernel_notice import notice_kernels
from lockstep.train.preflight import check_lane, warnings_of
from lockstep.train.start_model import describe_augment, describe_own, explain_host_path, make_model


@dataclass(frozen=True)
class Given:
    """What a script gives in place of what the Run names, and its own metrics and augmentation."""

    model: nn.Module | None = None
    data: Any = None
    loss: Loss | None = None
    metrics: Metrics = field(default_factory=dict)
    augment: OwnFunction | None = None

    def targets(self, run: Run) -> dict[str, Any]:
        """What the targets of its data may be: see `from_map_style`."""
        any_target = self.loss is not None
        return {"any_target": any_target, "values": not any_target and run.train.targets != "classes"}


@dataclass
class Setup:
    """The parts of a run, ready to train or evaluate."""

    run: Run
    device: torch.device
    store: Store
    model: nn.Module
    loss: Loss
    identity: Identity
    warnings: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    lowering: DeviceLowering | None = None  # of whole steps on the device; None: through the host
    batched: dict[tuple[int, ...], bool] = field(default_factory=dict)  # see `Sample.known`
    grid: SplitGraph | None = None  # if sums over pixels or outputs follow train.bands, train.slices
    metrics: Metrics = field(default_factory=dict)
    own_augment: OwnFunction | None = None
    later: dict[int, BatchParts] = field(default_factory=dict)  # by first epoch, if the batch grows

    def at(self, first: int) -> Setup:
        """The same with the batch that begins in epoch `first`: one of `later`, or its own."""
        if first not in self.later:
            return self
        found = {name: getattr(self.later[first], name) for name in ("run", "lowering", "grid", "batched")}
        return replace(self, **found, later={})

    @property
    def memory_format(self) -> torch.memory_format:
        return memory_format(self.run)

    @property
    def model_name(self) -> str:
        """The Run's name for the model, or the class of a user's module."""
        return type(self.model).__name__ if self.is_own_model else self.run.model.name

    @property
    def is_own_model(self) -> bool:
        """Whether a script gave the module."""
        return "source.model.class" in self.identity

    @property
    def is_scripted(self) -> bool:
        """Whether a script gave the module, the data or the loss, which no command line can."""
        return is_scripted(self.identity)

    @property
    def is_classifier(self) -> bool:
        """Whether the model gives one logit for each class, so that samples can be counted correct."""
        return not isinstance(self.loss, WholeLoss)

    @property
    def half(self) -> torch.dtype | None:
        return half_type(self.run.train.precision)

    def lower(self, read: Callable[[], Lanes], group: Group) -> LaneByLane:
        """The model made ready to run a worker's lanes; `read` returns a step's lanes, for their shapes."""
        run = self.run
        if self.lowering:
            from lockstep.lower.device_lanes import DeviceLanes

            return DeviceLanes(self.model, self.lowering, run.seed, group)
        if run.train.local_steps > 1:
            return LocalLanes(self.model, self.loss, run.seed, self.half, self.grid)
        if self.grid:
            return LaneByLane(self.model, self.loss, run.seed, self.half, self.grid)
        return lower_for_host(
            self.model,
            self.loss,
            seed=run.seed,
            half=self.half,
            rounds=run.train.wire != "fp32" or run.train.compress != "none",
            sample=None if self.store.sizes or run.train.recompute else Sample(read, self.batched),
        )

    def about(self) -> About:
        """The facts about the run that are reported and saved."""
        return About(
            self.run,
            self.identity,
            self.model_name,
            self.store.name,
            sum(p.numel() for p in self.model.parameters()),
            len(self.store.train),
            len(self.store.test),
            len(self.store.val or ()),
            self.store.chosen_by[0],
            tuple(self.notices),
            tuple(self.warnings),
        )

    def augment(self) -> Augment:
        """How images are changed on their way from the store to the model."""
        return self._make_augment(self.store.shape)

    def stages(self) -> SizeStages | None:
        """The training images of each epoch, if their size depends on it."""
        return SizeStages(self.store, self._make_augment) if self.store.sizes else None

    def _make_augment(self, shape: tuple[int, int, int]) -> Augment:
        store = self.store
        return make_augment(self.run, shape, store.mean, store.std, self.own_augment, store.train)

    def evaluator(self, group: Group, graph: bool = True) -> Evaluator:
        """Evaluation after every epoch, in blocks of one lane, by all workers."""
        lowering = lower_for_evaluation(self.run, self.model, self.loss, self.store, self.lowering)
        return place_evaluator(self.stock_evaluator(group), lowering, graph)

    def stock_evaluator(self, group: Group) -> Evaluator:
        """The same through the host, with stock kernels."""
        loss = plain_loss(self.loss)
        return Evaluator(
            self.run, self.store.chosen_by[1], self.augment(), loss, self.device, group, self.metrics
        )


def set_up(
    run: Run,
    device: torch.device,
    given: Given | None = None,
    recorded: Identity | None = None,
    in_stages: bool = False,
) -> Setup:
    """Check and build all that a run needs on a prepared device.

    A resumed run passes its `recorded` identity; it no longer needs the weights that it started from. If it
    trains `in_stages`, no worker needs memory for a lane of the whole model.
    """
    given = given or Given()
    model, data, loss = given.model, given.data, given.loss
    store = open_data(run) if data is None else from_map_style(data, **given.targets(run))
    check_batch(store, run.train)
    check_augment(run, store, given.augment)
    source: dict[str, Any] = {}
    notices = [*store.notices, *explain_cache(run, store)]
    if model is None:
        model = make_model(run, store, recorded, source, notices)
    else:
        describe_own(run, model, source)
    if given.augment:
        source["augment"] = describe_augment(given.augment, store)
        notices += explain_host_path(given.augment, device)
    if loss is not None:
        source["loss"] = describe_loss(loss, len(store.classes))
    if not any(p.requires_grad for p in model.parameters()):
        raise ModelError("the model has no parameter that requires a gradient, so there is nothing to train")
    model = to_device(model, device, run)
    chosen_loss = choose_loss(model, loss, store, run.train, device)
    check_eval_shape(model, chosen_loss, store, device)
    check_sizes(model, chosen_loss, store, run, device)
    warnings = check_lane(model, chosen_loss, store, run, device)
    warnings += explain_no_accuracy(model, chosen_loss, store, device)
    counts = not isinstance(chosen_loss, WholeLoss)
    metrics = find_metrics(run, given.metrics, model, store, counts, source)
    is_own = bool({"model", "loss"} & source.keys())
    parts = find_batch_parts(run, model, chosen_loss, store, device, is_own=is_own, in_stages=in_stages)
    lowering, grid = parts[0].lowering, parts[0].grid
    notices += notice_kernels(run, chosen_loss, device, lowering, bool(grid), parts[0].refusal)
    if not counts and loss is not None:
        source["outputs"] = "of any shape"
    codecs = describe_codecs(run, model, device, notices)
    notices += explain_update(run.optimizer, model, device)
    identity = make_identity(
        run,
        data=store.facts(),
        model=source,
        fingerprint={**fingerprint(device), **parts[0].numerics, **later_facts(parts), **codecs},
        kernels=lowering.facts() if lowering else {"set": "stock"},
    )
    warnings += [*store.warnings, *warnings_of(run, model, len(store.train), device)]
    return Setup(
        run,
        device,
        store,
        model,
        chosen_loss,
        identity,
        warnings,
        notices,
        lowering,
        metrics=metrics,
        grid=grid,
        own_augment=given.augment,
        later={first: found for first, found in parts.items() if first},
    )
