"""One step through the host: lanes, lane tree over all workers, clipping, and the update if all is finite.

A gradient's path: backward → lane tree → bucket → group → lane tree → optimizer. Nothing of the state
changes before all lanes are summed and found finite, so a step that fails can simply be run again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from functools import cached_property, partial

import torch
from torch import Tensor

from lockstep.comm.group import Group
from lockstep.comm.mesh import Mesh
from lockstep.comm.reducer import BUCKET_MB
from lockstep.data.loader import Lanes
from lockstep.errors import NumericsError
from lockstep.kernels.loss import WholeLoss, main_labels
from lockstep.kernels.numerics import check_allocations, failed_allocations
from lockstep.lanes.step_reduction import Buckets, Means, StepReduction, read_finite
from lockstep.lower.lane_by_lane import LaneByLane
from lockstep.lower.local_lanes import LocalLanes
from lockstep.lower.param_gradient import OnGradient
from lockstep.parallel.shard.sharded_model import ShardedModel
from lockstep.parallel.stage_numbers import StageNumbers, merge_stages
from lockstep.runs.train_state import TrainState
from lockstep.spec import Run
from lockstep.train.audit import Audit
from lockstep.train.clip import chunk_sums, clip_gradients, clip_values, norm_of_chunks
from lockstep.train.result import StepResult
from lockstep.train.update.matrix_deal import Moves, exchange_moves
from lockstep.train.update.state_update import find_rates, update_state
from lockstep.train.update.weight_average import average_weights

Requests = Callable[[], tuple[bool, bool]]  # this worker's: (stop, move to another generation)


class NotFinite(Exception):
    """A step on the device was not taken, because its loss or a gradient is not finite."""

    def __init__(self, loss: float) -> None:
        self.loss = loss


class Step:
    """Runs steps of a Run on a TrainState."""

    def __init__(
        self,
        run: Run,
        state: TrainState,
        lowered: LaneByLane,
        steps_per_epoch: int,
        mesh: Mesh | None = None,
        *,
        bucket_mb: float = BUCKET_MB,
        overlap: bool = True,
    ) -> None:
        self._run, self._state, self._lowered = run, state, lowered
        self._steps_per_epoch = steps_per_epoch
        self._total_steps = steps_per_epoch * run.train.epochs
        self._mesh = mesh or Mesh()
        self.sharded: ShardedModel | None = None  # if the workers along `data` share the parameters
        self._options = bucket_mb, overlap
        self.audit: Audit | None = None

    def __call__(self, lanes: Lanes, stop: bool = False, move: bool = False) -> StepResult:
        """Compute and commit one step, or one round; `stop` and `move` ask all workers to leave after it."""
        self._device, self._steps = lanes.images.device, lanes.steps
        reduction, audit, start = self._reduction, self.audit, time.perf_counter()
        self._begin()
        seen, lane, failed = 0, lanes.first, failed_allocations(self._device)
        requests = [torch.tensor(float(request), device=lanes.images.device) for request in (stop, move)]
        early: OnGradient | None = reduction.put if reduction.overlaps else None
        if self._lowered.hands_over:
            early = partial(reduction.put, height=0)
        for output in self._lowered.run(lanes, self._state.step, early):
            correct = requests[0].new_zeros(())
            if not isinstance(self._lowered.loss, WholeLoss):
                labels = lanes.labels[seen : seen + len(output.logits)]
                seen += len(labels)
                correct = (output.logits.argmax(1) == main_labels(labels)).sum().float()
            if audit:
                audit.watch(self._state.step, lane, output)
            lane += 1 << output.height
            numbers = [output.loss, correct, *(request.clone() for request in requests)]
            reduction.add(output.grads, numbers, output.float_buffers, output.int_buffers, output.height)
        computed = time.perf_counter()
        means, exchange_s = self._finish_reduction(reduction)
        check_allocations(self._device, failed)
        if audit:
            audit.check(self._state.step)
        reduction.check_ints()
        clip, norm = self._run.train.clip, means.numbers[0]
        found = dict(zip(self._lowered.params, means.grads, strict=True)) | self._lowered.own_means()
        grads = {name: found[name] for name in self._state.trained()}
        chunks = self._sum_chunks(grads) if clip else {}
        if clip and not self._state.parts:
            norm = norm_of_chunks(chunks)
        (loss, right, stops, moves), is_finite, fits = read_finite(
            means.numbers, means.floats, [*grads.values(), norm]
        )
        self._mesh.data.check()
        if self._state.parts:
            self._state.finish = partial(self._finish, list(grads.values()), [*means.floats, *means.ints])
            mine = StageNumbers(loss, right, stops, moves, is_finite, fits, chunks)
            loss, right, stops, moves, is_finite, fits, chunks = merge_stages(self._mesh.world, mine)
            norm = norm_of_chunks(chunks) if clip else norm
            fits = fits and bool(norm.isfinite())
        elif self._mesh.stage.size > self._mesh.data.size:  # those of the same lanes were not asked yet
            mine = StageNumbers(loss, right, stops, moves, is_finite, fits, {})
            _, _, stops, moves, is_finite, fits, _ = merge_stages(self._mesh.world, mine)
        scale = self._state.scale
        if not is_finite or not (fits or (scale and scale.can_shrink)):
            self._state.finish = None
            raise self.not_finite(loss, lanes)
        norm = norm if fits else torch.full_like(norm, math.inf)
        lr = self._finish(list(grads.values()), [*means.floats, *means.ints], norm, self._mesh.stage)
        return StepResult(
            loss,
            round(right * self._run.train.lanes),
            lr,
            stops > 0,
            moves > 0,
            compute_s=computed - start if self._device.type == "cpu" else 0.0,
            exchange_s=exchange_s,
            hidden_s=max(reduction.reducer.exchange_s - exchange_s, 0.0),
            steps=lanes.steps,
            scale=scale.value if scale else None,
            skipped=not fits,
        )

    def _begin(self) -> None:
        state = self._state
        self._lowered.scale = state.scale
        self._rates = find_rates(self._run, state, self._steps_per_epoch, self._total_steps)
        if self.sharded:
            self.sharded.prepare()
        self._reduction.begin(state.step_in_epoch == 0, state.epoch >= self._run.train.compress_after)
        if self.audit:
            self.audit.begin(state.step, self._reduction.reducer)
        if isinstance(self._lowered, LocalLanes):
            self._lowered.begin_round(self._steps, state.groups, self._rates[1:])

    def _finish_reduction(self, reduction: StepReduction) -> tuple[Means, float]:
        """The means over all lanes, and the seconds until the other workers' were there."""
        start = time.perf_counter()
        means = reduction.finish()
        return means, time.perf_counter() - start if self._mesh.data.size > 1 else 0.0

    def _sum_chunks(self, grads: Mapping[str, Tensor]) -> dict[tuple[str, int], Tensor]:
        """The `chunk_sums` of gradients, or of this worker's pieces of them, by name and first element."""
        starts = self._state.share.starts if self._state.share else {}
        pieces = {(name, starts.get(name, 0)): grad for name, grad in grads.items()}
        pieces = self.sharded.by_chunks(pieces) if self.sharded else pieces
        return {place: chunk_sums(grad) for place, grad in pieces.items()}

    def _finish(
        self, grads: list[Tensor], buffers: list[Tensor], norm: Tensor, dealt: Group | None = None
    ) -> float:
        """Clip by the norm of all gradients, let workers who are `dealt` matrices exchange them, and commit.

        A norm that is not finite says that the gradients overflowed in fp16, so that nothing is updated.
        Of a state in parts all workers must commit, or none. Where one did, all have summed their gradients:
        one that lost the others before it knew the norm gets it from there, and commits later; one that
        lost them while matrices were exchanged computes all of them.
        """
        state, train = self._state, self._run.train
        if state.scale and not norm.isfinite():
            state.finish, state.norm = None, norm if state.parts else None
            return self._move_on()
        if train.clip:
            clip_gradients(grads, norm, train.clip)
        if train.clip_value:
            clip_values(grads, train.clip_value)
        state.finish = (lambda norm: self._commit(grads, buffers)) if state.parts else None
        moves = None
        if dealt and not self.sharded:
            moves = exchange_moves(state, dict(zip(state.trained(), grads, strict=True)), dealt)
        state.finish, state.norm = None, norm if state.parts else None
        return self._commit(grads, buffers, moves)

    @cached_property
    def _reduction(self) -> StepReduction:
        """Made by the first step through the host; steps that stay on the device use another reducer."""
        params = [p.detach() for p in self._lowered.params.values()]
        numbers = [torch.zeros((), device=self._device)] * 4
        return StepReduction(
            self._mesh.data,
            self._run.train.lanes,
            Means(params, numbers, self._lowered.float_buffers(), self._lowered.int_buffers()),
            self._lowered.int_names(),
            Buckets(
                torch.bfloat16 if self._run.train.wire == "bf16" else None,
                *self._options,
                self.sharded.shards(list(self._lowered.params)) if self.sharded else (),
                self._state.feedback,
                list(self._lowered.params),
            ),
        )

    def sent_bytes(self) -> int:
        """What this worker sent of the last step's gradients; 0 if no step went through the host."""
        return self._reduction.reducer.sent_bytes if "_reduction" in vars(self) else 0

    def close(self) -> None:
        """End the reduction's background thread."""
        if "_reduction" in vars(self):
            self._reduction.close()

    @torch.no_grad()
    def _commit(self, grads: list[Tensor], buffers: list[Tensor], moves: Moves | None = None) -> float:
        run, state = self._run, self._state
        update_state(
            state, state.updates, self._rates[1:], dict(zip(state.trained(), grads, strict=True)), moves
        )
        for buffer, value in zip(self._lowered.buffers(), buffers, strict=True):
            buffer.copy_(value)
        if run.train.ema:
            average_weights(state, run.train.ema)
        self._reduction.reducer.commit()
        if self.sharded:
            self.sharded.is_published = False  # not now: until all is committed here nothing may fail
        return self._move_on(is_updated=True)

    def _move_on(self, is_updated: bool = False) -> float:
        """Move the cursor, and the scale of the loss; returns the rate of the step that is done."""
        state = self._state
        if state.scale:
            state.scale = state.scale.after(not is_updated, self._run.train.scale_growth)
        state.step += self._steps
        state.step_in_epoch += self._steps
        state.inner_steps += self._steps - 1
        return self._rates[0]

    def not_finite(self, loss: float, lanes: Lanes) -> NumericsError:
        """The error of a step that was not taken because a value is not finite, on any worker."""
        self._lowered.scale = self._state.scale  # steps on the device have not told it
        found = self._lowered.first_bad(lanes, self._state.step) or ""
        everywhere = [text.decode() for text in self._mesh.world.all_gather_bytes(found.encode())]
        where = next(filter(None, everywhere), "the sum over lanes")
        return NumericsError(
            f"step {self._state.step}: not finite: {where} (loss {loss:g}); the step was not applied: "
            f"lower optimizer.lr={self._run.optimizer.lr:g}, set train.clip=1 or lengthen "
            f"schedule.warmup_epochs{', or use train.precision=bf16' if self._state.scale else ''}"
        )
