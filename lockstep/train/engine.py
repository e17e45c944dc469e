"""The engine: runs an epoch's steps through the host (`step.py`) or on the device (`device/`).

A batch's path ends here: store → order → augment → loader → step. Both ways give the same bits.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from lockstep.comm.tree import worker_lanes
from lockstep.data.loader import Lanes, TrainLoader
from lockstep.lower.local_lanes import join_round
from lockstep.parallel.mix.mixed_lanes import MixedLanes
from lockstep.parallel.pipelined_lanes import PipelinedLanes
from lockstep.parallel.split.layer_clock import STEP
from lockstep.parallel.split.layer_report import measured, summarize_layers
from lockstep.runs.train_state import TrainState
from lockstep.spec import Launch
from lockstep.spec.plan import Plan
from lockstep.spec.prediction import OF
from lockstep.train.audit import Audit
from lockstep.train.dealt import Dealt
from lockstep.train.foresight.own_prediction import predict_own
from lockstep.train.foresight.step_parts import StepParts
from lockstep.train.result import StepResult
from lockstep.train.step import NotFinite, Requests, Step

if TYPE_CHECKING:
    from lockstep.train.device.device_epoch import DeviceEpochs


class Engine:
    """Runs the steps of one worker in one group; must be closed."""

    def __init__(self, dealt: Dealt, state: TrainState, launch: Launch) -> None:
        setup, group = dealt.setup, dealt.mesh.data
        self._setup, self._state, self._launch, self._group = setup, state, launch, group
        self._world, self._needs, self._split = dealt.mesh.world, dealt.needs, dealt.split
        self._products, self._plan = dealt.products, replace(dealt.plan, data=group.size)
        self._loader = self._make_loader(worker_lanes(setup.run.train.lanes, group.size, group.rank))
        self._lowered = dealt.lower(lambda: next(self._loader.epoch(0)))
        self._step = Step(
            setup.run,
            state,
            self._lowered,
            len(self._loader),
            dealt.mesh,
            bucket_mb=launch.bucket_mb,
            overlap=launch.overlap,
        )
        self._step.sharded = dealt.sharded
        self._step.audit = self._make_audit() if launch.audit else None
        self._device_epochs = self._make_device_epochs()
        self._parts = StepParts()

    def epoch(self, is_due: Callable[[int], bool], requests: Requests) -> Iterator[StepResult]:
        """Run the steps that are left of the current epoch; those of a round (train.local_steps) together.

        The state's tensors are up to date only after a step that `is_due`, after the last one, and after one
        whose result says to stop or to move.
        """
        if self._device_epochs:
            try:
                yield from self._on_device(self._device_epochs, is_due, requests)
            except NotFinite as error:
                raise self._step.not_finite(error.loss, self._read(self._loader)) from None
            return
        state, before = self._state, self._loader.waited_s
        batches = self._loader.epoch(state.epoch, state.step_in_epoch)
        rounds = iter(lambda: list(islice(batches, self._loader.at_once)), [])
        for lanes in map(join_round, rounds):
            waited_s, before = self._loader.waited_s - before, self._loader.waited_s
            start = time.perf_counter()
            result = replace(self._through_host(lanes, requests), waited_s=waited_s)
            self._parts.add(time.perf_counter() - start + waited_s, result)
            del lanes  # before the next ones are read
            yield result

    def _on_device(
        self, epochs: DeviceEpochs, is_due: Callable[[int], bool], requests: Requests
    ) -> Iterator[StepResult]:
        """Run the epoch's steps on the device, except audited steps, which go through the host."""
        state, steps = self._state, len(self._loader)
        while state.step_in_epoch < steps:
            until = self._next_audit(steps)
            if state.step_in_epoch < until:
                for result in epochs.run(until, is_due, requests, synced=self._launch.trace):
                    self._parts.add(result.seconds, result)
                    yield result
            if state.step_in_epoch < until:
                return  # asked to stop or to move
            if until < steps:
                yield self._through_host(self._read(self._loader), requests)

    def _next_audit(self, steps: int) -> int:
        """The next audited step of the epoch; `steps` if there is none."""
        audit, first = self._step.audit, self._state.step_in_epoch
        offset = self._state.step - first
        return next((n for n in range(first, steps) if audit and audit.is_due(offset + n)), steps)

    def _through_host(self, lanes: Lanes, requests: Requests) -> StepResult:
        clock = self._split.axes.clock if self._split else None
        clock = self._products.workers.clock if self._products else clock
        if clock:
            clock.begin_step()
        with clock.busy(STEP) if clock else nullcontext():
            result = self._step(lanes, *requests())
        if clock:
            clock.end_step()
        if self._world.size == 1 and requests()[0]:  # requested during the step, so stop now
            result = replace(result, stop=True)
        return result

    def tell(self, plan: Plan) -> dict[str, Any]:
        """The plan, if it splits the model, and how stages and layers spent their time. A collective."""
        stages, layers = self.stages(), self.layers()
        told: dict[str, Any] = {"plan": str(plan)} if plan.splits else {}
        told |= {"stages": stages} if plan.pipeline > 1 else {}
        told |= {"by_channel": found} if (found := self.by_channel()) else {}
        return told | ({"layers": layers} if layers else {}) | self.sent() | self.predicted()

    def stages(self) -> list[dict[str, Any]]:
        """How each worker's stage of a pipeline spent its time; empty without a pipeline. A collective."""
        if not isinstance(self._lowered, PipelinedLanes):
            return []
        mine = json.dumps(self._lowered.report(self._setup.device)).encode()
        return [json.loads(row) for row in self._world.all_gather_bytes(mine)]

    def layers(self) -> dict[str, Any]:
        """What layers over several workers computed and exchanged; empty without them. A collective."""
        if self._products:
            told = json.dumps(self._products.measured()).encode()
            return self._products.summarize([json.loads(m) for m in self._world.all_gather_bytes(told)])
        if not self._split:
            return {}
        mine = json.dumps(measured(self._split)).encode()
        found = [json.loads(row) for row in self._world.all_gather_bytes(mine)]
        return summarize_layers(self._split, found)

    def by_channel(self) -> list[dict[str, Any]]:
        """What the workers sent for each layer that is split by name; empty without such. A collective."""
        if not isinstance(self._lowered, MixedLanes):
            return []
        mine = json.dumps(self._lowered.report()).encode()
        every = [json.loads(row) for row in self._world.all_gather_bytes(mine)]
        return [
            {
                **row,
                **{key: [found[i][key] for found in every] for key in ("outputs", "sent_mb", "exchange_s")},
            }
            for i, row in enumerate(every[0])
        ]

    def sent(self) -> dict[str, float]:
        """The most that a worker sent in a step; those of a round share its exchange. A collective."""
        sent = max(self._step.sent_bytes(), self._device_epochs.sent_bytes if self._device_epochs else 0)
        told = self._world.all_gather_bytes(str(sent).encode())
        rounds, steps = -(-len(self._loader) // self._loader.at_once), len(self._loader)
        most = max(map(int, told)) * rounds / steps
        return {"sent_mb_step": round(1e-6 * most, 6)} if most else {}

    def predicted(self) -> dict[str, Any]:
        """The parts of a step as they were predicted and as worker 0 measured them; empty for the others."""
        if self._world.rank:
            return {}
        told, source = self.foretell()
        found = self._parts.compare(told)
        return {"predicted": found, "predicted_from": source} if found else {}

    def foretell(self) -> tuple[Mapping[str, Any], str]:
        """Predicted seconds of the parts of a step, and from what; empty if this machine was not probed."""
        told, train = self._launch.predicted, self._setup.run.train
        is_own = all(told.get(key, getattr(train, key)) == getattr(train, key) for key in OF)
        return (told, "the plan's file") if told and is_own else predict_own(self._setup, self._plan)

    def close(self) -> None:
        """End the background threads, and restore the model."""
        self._step.close()
        if self._device_epochs:
            self._device_epochs.close()
        self._lowered.release()

    def _make_loader(self, lanes: range) -> TrainLoader:
        setup, train = self._setup, self._setup.run.train
        loader = TrainLoader(
            setup.store.train,
            setup.augment(),
            batch=train.batch,
            lanes=train.lanes,
            own=lanes,
            device=setup.device,
            memory_format=setup.memory_format,
        )
        loader.needs, loader.stages, loader.at_once = self._needs, setup.stages(), train.local_steps
        return loader

    def _read(self, loader: TrainLoader) -> Lanes:
        """The lanes of the current step."""
        return next(loader.epoch(self._state.epoch, self._state.step_in_epoch))

    def _make_device_epochs(self) -> DeviceEpochs | None:
        """The steps that stay on the device; None if the kernels do not allow that."""
        in_parts = self._state.parts and not self._state.feedback
        if not self._setup.lowering or in_parts or self._products:  # no exchange in a CUDA graph
            return None
        if self._deals_matrices:
            return None
        from lockstep.train.device.device_epoch import make_device_epochs

        return make_device_epochs(self._setup, self._state, self._lowered, self._group, self._launch)

    @property
    def _deals_matrices(self) -> bool:
        """Whether matrices are dealt to several workers, who exchange them before a step is committed."""
        return self._group.size > 1 and any(group.rule.whole == "matrix" for group in self._state.groups)

    def _make_audit(self) -> Audit:
        setup, world = self._setup, self._launch.world
        name = (world.name if world else "") or str(self._group.rank)
        return Audit(
            self._launch.audit,
            setup.run.seed,
            setup.run.train.lanes,
            self._group,
            self._lowered,
            lambda lanes: self._read(self._make_loader(lanes)),
            f"worker {name} on {socket.gethostname()}",
        )
