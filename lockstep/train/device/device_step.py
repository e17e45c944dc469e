"""One step on the device: computes gradients, and applies the update if all values are finite.

A gradient takes the same path as in `step.py`, and every bit is the same. The state is in flat tables; order,
keys and rates are in tables filled when an epoch begins, and the kernels read them at a cursor on the device.
A step that is not finite changes nothing, and neither does any step after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from lockstep.data.augment import Augment
from lockstep.data.order import half_width, lane_positions, order_keys
from lockstep.data.store import Split
from lockstep.kernels.triton.batch_gather import Move, gather_batch
from lockstep.kernels.triton.epoch_order import order
from lockstep.kernels.triton.lane_tree_sum import lane_tree_sum
from lockstep.kernels.triton.optimizer_update import FlatTables, advance_cursor
from lockstep.kernels.triton.scale_update import ScaleTables, judge_step, move_scale
from lockstep.lower.device_lanes import DeviceLanes
from lockstep.runs.train_state import TrainState
from lockstep.spec import Run
from lockstep.train.clip import clip_gradients, clip_values, gradient_norm
from lockstep.train.device.flat_optimizer import FlatOptimizer
from lockstep.train.device.prefetch import place_images
from lockstep.train.update.weight_average import averaging


class DeviceStep:
    """The tables of a Run on the device, and the kernels of its step for the lanes of one worker."""

    def __init__(
        self, run: Run, state: TrainState, fused: DeviceLanes, split: Split, augment: Augment, own: range
    ) -> None:
        self.run, self.state, self._fused, self._augment, self._own = run, state, fused, augment, own
        device = next(iter(fused.params.values())).device
        self.device, self.steps = device, len(split) // run.train.batch
        self._epoch = -1  # the epoch whose order, keys and rates are in the tables
        self.network = fused.network(len(own))
        self._layout, self._program = self.network.layout, fused.program
        size, count = self._layout.size, len(own) * self.network.lane_size

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.heights = [height for _, height in fused.roots(own)]
        self.roots = [zeros(size) for _ in self.heights]
        self.grads = zeros(size)
        self._average = zeros(size) if state.ema else None
        params = {name: p.detach() for name, p in fused.params.items()}
        self._optimizer = FlatOptimizer(state, self._program, self._layout, params, self.steps)
        first = lane_positions(0, run.train.batch, run.train.lanes)[own.start : own.stop].flatten()
        steps = torch.arange(self.steps)[:, None] * run.train.batch
        positions = (first + steps).to(device)
        self._positions, self._turns = positions // augment.repeats, positions % augment.repeats
        self._order, self._length = zeros(self.steps, count, dtype=torch.int64), len(split)
        self.images = place_images(split, self._order, device, augment)
        self._keys = zeros(self.steps, len(fused.program.drops), len(own), dtype=torch.int64)
        self._augment_keys = zeros(5, dtype=torch.int64)
        self._normal = augment.normal(self.images.images)
        self._ignored = zeros(1, dtype=torch.int32)
        self.results = zeros(self.steps, 3)  # loss, right answers, whether nothing was updated
        # the cursor; whether a step was not finite; steps that were skipped since the tables were filled
        self.status = zeros(3, dtype=torch.int32)
        self._cursor, self._bad, self._skipped = (self.status[n : n + 1] for n in range(3))
        self._held = self._bad  # whether the last step updated nothing
        self._scale = self._begin_scale()
        self._clipped = [torch.empty_like(p) for p in fused.params.values()] if run.train.clip else []
        self._tables = FlatTables(
            self.network.weights, self.grads, self._average, self.network.copy, self._cursor, self._held,
            self._layout.params, self._skipped if self._scale else None,
        )  # fmt: skip

    def _begin_scale(self) -> ScaleTables | None:
        """The scale of the loss, if there is one; then a step may be held that is not bad."""
        scale = self.network.scale
        if not self.state.scale or scale is None:
            return None
        self._held, taken = (torch.zeros_like(self._bad) for _ in range(2))
        return ScaleTables(scale, taken, self._held, self.run.train.scale_growth)

    @property
    def params(self) -> dict[str, nn.Parameter]:
        """The parameters that the tables hold, by name."""
        return self._fused.params

    def split(self, flat: Tensor, tensors: Sequence[Tensor]) -> None:
        """Copy the gradients in a flat table to tensors shaped as the parameters."""
        self._program.from_flat(self._layout, flat, tensors)

    def join(self, tensors: Sequence[Tensor], flat: Tensor) -> None:
        """The other way."""
        self._program.to_flat(self._layout, tensors, flat)

    @property
    def held(self) -> Tensor:
        """Whether the last step updated nothing."""
        return self._held != 0

    def parts(self, flat: Tensor) -> list[Tensor]:
        """Split a flat table: gradients, sent in the wire type; statistics and loss, sent as they are."""
        return [flat[: self._layout.params], flat[self._layout.params :]]

    def compute(self) -> None:
        """Gather, forward, backward, and the sums over this worker's subtrees of the lane tree."""
        network, augment = self.network, self._augment
        move = Move(augment.crop_padding, augment.flip, augment.cutout)
        gather_batch(
            self.images.images, self.images.labels, self.images.places, self._order, self._cursor,
            self._bad, self._augment_keys, self._normal, network.x[0], network.labels, move,
            network.pad,
        )  # fmt: skip
        if any(self._program.drops):
            network.keys.copy_(self._keys.index_select(0, self._cursor)[0])
        network.compute()
        first = 0
        for root, height in zip(self.roots, self.heights, strict=True):
            network.sum_lanes(range(first, first + (1 << height)), root, self._ignored)
            first += 1 << height

    def commit(self, sums: Tensor, scale: float) -> None:
        """Clip and update by the gradient `sums` times `scale`, if it is finite; then advance the cursor."""
        if self._scale:
            self._held.zero_()
            for part, out, found in zip(
                self.parts(sums), self.parts(self.grads), (self._held, self._bad), strict=True
            ):
                lane_tree_sum(part.view(1, -1), out, found, scale)
        else:
            lane_tree_sum(sums.view(1, -1), self.grads, self._bad, scale)
        self._clip()
        if self._scale:
            judge_step(self._scale, self._bad)
        self._optimizer.update(self._tables)
        if self._scale:
            move_scale(self._scale, self._bad, self._skipped, self._cursor, self.results)
        ends = self.grads[self._layout.loss :], self.grads[self._layout.right :]
        advance_cursor(self._cursor, self._bad, *ends, self.results)

    def _clip(self) -> None:
        train, grads = self.run.train, self._clipped
        if train.clip_value:
            clip_values(self.parts(self.grads)[:1], train.clip_value)
        if not train.clip:
            return
        self._program.from_flat(self._layout, self.grads, grads)
        norm = gradient_norm(dict(zip(self._fused.params, grads, strict=True)))
        torch.maximum(self._held, (~norm.isfinite()).int(), out=self._held)
        clip_gradients(self.parts(self.grads)[:1], norm, train.clip)

    def run_alone(self) -> None:
        """A whole step of the only worker."""
        self.compute()
        self.commit(self.roots[0], 1.0 / self.run.train.lanes)

    def dry_run(self, run: Callable[[], object] | None = None) -> None:
        """Compile every kernel by a step that is marked as not finite, so that it changes nothing."""
        self.status.copy_(torch.tensor([0, 1, 0]))
        (run or self.run_alone)()

    def _begin_epoch(self) -> None:
        """Fill the tables with the order, keys and rates of the epoch."""
        run, state, train = self.run, self.state, self.run.train
        self._epoch = state.epoch
        if self._augment.block or self._augment.classes:  # of each position without its repetitions
            once = replace(self._augment, repeats=1)
            ids = once.order(state.epoch, self._positions.cpu().flatten(), self._length)
            self._order.copy_(ids.view_as(self._order))
        else:
            keys = torch.tensor(order_keys(run.seed, state.epoch), device=self.device)
            order(self._positions, keys, self._order, self._length, half_width(self._length))
        self._order.add_(self._turns * self._length)
        self._augment_keys.copy_(torch.tensor(self._augment.keys(state.epoch)))
        steps = range(state.step - state.step_in_epoch, state.step - state.step_in_epoch + self.steps)
        done = state.epoch * self.steps  # not `state.step`: see `step.py`
        places, first = range(done, done + self.steps), state.updates - state.step_in_epoch
        self._skipped_before = state.scale.skipped if state.scale else 0
        updates = [max(first + n, 0) for n in range(self.steps)]
        self._optimizer.fill(
            lambda base: [self.rate(place, base) for place in places],
            [averaging(train.ema, n) for n in updates],
            updates,
        )
        if any(self._program.drops):
            self._keys.copy_(torch.stack([self._fused.dropout_keys(self._own, n) for n in steps]))

    @torch.no_grad()
    def begin(self) -> None:
        """Copy the state into the tables, and set the cursor to the state's next step."""
        state = self.state
        if state.epoch != self._epoch:
            self._begin_epoch()
        self.images.begin_epoch(state.step_in_epoch, state.epoch)
        for tensors, flat in self._pairs():
            self._program.to_flat(self._layout, tensors, flat)
        self.network.copy.copy_(self.network.weights)
        skipped = 0
        if state.scale and self._scale:
            skipped = state.scale.skipped - self._skipped_before
            self._scale.scale.copy_(torch.tensor([state.scale.value, state.scale.inverse]))
            self._scale.taken.fill_(state.scale.steps)
        self._counts = [count - state.step_in_epoch + skipped for count in self._fused.int_buffers()]
        self.status.copy_(torch.tensor([state.step_in_epoch, 0, skipped]))

    @torch.no_grad()
    def flush(self) -> None:
        """Copy the tables back into the state's tensors."""
        for tensors, flat in self._pairs():
            self._program.from_flat(self._layout, flat, tensors)
        for count, before in zip(self._fused.int_buffers(), self._counts, strict=True):
            count.copy_(before + self._cursor[0] - self._skipped[0])

    def _pairs(self) -> list[tuple[list[Tensor], Tensor]]:
        """The state's tensors of each kind, with the flat table that holds them."""
        params = [p.detach() for p in self._fused.params.values()]
        pairs = [([*params, *self._fused.float_buffers()], self.network.weights)]
        pairs += self._optimizer.memory()
        if self._average is not None:
            names = *self._fused.params, *self._fused.float_names()
            pairs.append(([self.state.ema[name] for name in names], self._average))
        return pairs

    def rate(self, step: int, base: float | None = None) -> float:
        """The learning rate of a step; of the run's own optimizer, if no other's base rate is given."""
        run = self.run
        total, base = self.steps * run.train.epochs, run.optimizer.lr if base is None else base
        return run.schedule.rate(run.rate_factor * base, step, total, self.steps)
