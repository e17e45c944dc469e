"""Whole steps that never leave the device: gather, forward, backward, lane tree and update in one CUDA graph.

For one worker whose model runs on fused kernels and whose images fit on the device. A gradient's way is the
same as in `step`, and so is every bit. The host starts steps ahead and reads their results later; a step
that is not finite changes nothing, and neither does any after it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.data.augment import Augment
from lockstep.data.order import epoch_ids
from lockstep.data.store import MemorySplit
from lockstep.kernels.device.gather import Move, gather
from lockstep.kernels.device.update import advance, update
from lockstep.spec import Run
from lockstep.train.fused import Fused
from lockstep.train.schedule import learning_rate
from lockstep.train.state import TrainState
from lockstep.train.step import NotFinite, StepResult

_AHEAD = 8  # steps that are started together; their results are read while the next ones run
_MOST_BYTES = 0.5  # of the device's free memory may hold images


@dataclass
class _Batch:
    """Steps that were started together."""

    first: int
    stop: int
    status: Tensor  # in pinned memory: the cursor, whether a step was not finite
    results: Tensor
    done: torch.cuda.Event


class ResidentStep:
    """Runs the steps of a Run on its TrainState, which is up to date whenever nothing is under way."""

    def __init__(
        self, run: Run, state: TrainState, fused: Fused, split: MemorySplit, augment: Augment, device: torch.device,
        *, graph: bool = True,
    ) -> None:  # fmt: skip
        self._run, self._state, self._fused, self._augment, self._device = run, state, fused, augment, device
        train = run.train
        self._steps = len(split) // train.batch
        self._network = fused.network(train.lanes, train.batch // train.lanes, device)
        self._images, self._labels = split.images.to(device), split.labels.to(device)
        size = self._network.layout.size

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._grads, self._memory = zeros(size), [zeros(size) for _ in state.memory]
        self._order = zeros(self._steps, train.batch, dtype=torch.int64)
        self._values = zeros(self._steps, 4)
        self._keys = zeros(self._steps, len(fused.chain.drops), train.lanes, dtype=torch.int64)
        self._augment_keys = zeros(5, dtype=torch.int64)
        self._normal = augment.normal(self._images)
        self._results = zeros(self._steps, 2)
        self._status = zeros(2, dtype=torch.int32)
        self._cursor, self._bad = self._status[:1], self._status[1:]
        self._graph = self._capture() if graph and device.type == "cuda" else None

    def epoch(
        self, is_due: Callable[[int], bool], wishes: Callable[[], tuple[bool, bool]], synced: bool = False
    ) -> Iterator[StepResult]:
        """The steps that are left of the epoch under way, until there is a wish to stop or to move.

        The state's tensors are up to date after the last one, after a step that `is_due`, and after every
        step if `synced`: nothing is started beyond it before it is told.
        """
        state = self._state
        self._begin_epoch()
        offset = state.step - state.step_in_epoch
        ends = [n for n in range(1, self._steps + 1) if synced or n == self._steps or is_due(offset + n)]
        at, clock = state.step_in_epoch, time.perf_counter()
        told: _Batch | None = None
        while True:
            stop, move = wishes()
            limit = next((n for n in ends if n > (told.first if told else at)), at)
            begun = None
            if at < limit and not (stop or move):
                begun = self._start(at, min(at + _AHEAD, limit))
                at = begun.stop
            if told:
                told.done.synchronize()
                if not begun:
                    self._flush()
                now = time.perf_counter()
                seconds, clock = (now - clock) / (told.stop - told.first), now
                yield from self._tell(told, seconds, *((stop, move) if not begun else (False, False)))
                if not begun:
                    clock = time.perf_counter()
            if not begun and (stop or move or at == self._steps):
                return
            told = begun

    def _tell(self, batch: _Batch, seconds: float, stop: bool, move: bool) -> Iterator[StepResult]:
        """The results of steps that are done; the state's cursor moves with them."""
        state, lanes = self._state, self._run.train.lanes
        cursor, bad = batch.status.tolist()
        for number, (loss, right) in enumerate(batch.results.tolist(), batch.first):
            if bad and number >= cursor:
                self._flush()
                raise NotFinite(loss)
            lr, last = self._rate(state.step), number == batch.stop - 1
            state.step += 1
            state.step_in_epoch += 1
            yield StepResult(loss, round(right * lanes), lr, stop and last, move and last, seconds)

    def _start(self, first: int, stop: int) -> _Batch:
        for _ in range(first, stop):
            self._graph.replay() if self._graph else self._launch()
        status = torch.empty(2, dtype=torch.int32, pin_memory=True)
        results = torch.empty(stop - first, 2, pin_memory=True)
        status.copy_(self._status, non_blocking=True)
        results.copy_(self._results[first:stop], non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return _Batch(first, stop, status, results, done)

    def _launch(self) -> None:
        """One step."""
        network, layout = self._network, self._network.layout
        move = Move(self._augment.crop_padding, self._augment.flip, self._augment.cutout)
        gather(
            self._images, self._labels, self._order, self._cursor, self._augment_keys, self._normal,
            network.x[0], network.labels, move, network.layers[0].pad,
        )  # fmt: skip
        if any(self._fused.chain.drops):
            network.keys.copy_(self._keys.index_select(0, self._cursor)[0])
        network.forward()
        network.backward()
        network.sum_lanes(self._grads, self._bad, 1.0 / network.lanes)
        update(
            self._run.optimizer, network.weights, self._grads, self._memory, network.copy, self._values,
            self._cursor, self._bad,
        )  # fmt: skip
        advance(
            self._cursor, self._bad, self._grads[layout.loss :], self._grads[layout.right :], self._results
        )

    def _capture(self) -> torch.cuda.CUDAGraph:
        """The step as a graph; the launches that compile its kernels change nothing, as if not finite."""
        self._bad.fill_(1)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._launch()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._launch()
        return graph

    @torch.no_grad()
    def _begin_epoch(self) -> None:
        """Order, keys and rates of the epoch, and the state, to where the kernels read them."""
        run, state, layout = self._run, self._state, self._network.layout
        ids = epoch_ids(
            run.seed, state.epoch, len(self._labels), run.train.batch, run.train.lanes, self._device
        )
        self._order.copy_(ids)
        self._augment_keys.copy_(torch.tensor(self._augment.keys(state.epoch)))
        first = state.step - state.step_in_epoch
        self._values.copy_(torch.tensor([self._row(first + n) for n in range(self._steps)]))
        if any(self._fused.chain.drops):
            lanes = range(run.train.lanes)
            keys = [self._fused.dropout_keys(lanes, first + n) for n in range(self._steps)]
            self._keys.copy_(torch.stack(keys))
        chain, params = self._fused.chain, [p.detach() for p in self._fused.params.values()]
        chain.to_flat(layout, params, self._network.weights)
        self._network.copy.copy_(self._network.weights)
        for flat, tensors in zip(self._memory, state.memory.values(), strict=True):
            chain.to_flat(layout, tensors, flat)
        self._cursor.fill_(state.step_in_epoch)
        self._bad.zero_()

    @torch.no_grad()
    def _flush(self) -> None:
        """The state from where the kernels keep it."""
        chain, layout = self._fused.chain, self._network.layout
        chain.from_flat(layout, self._network.weights, [p.detach() for p in self._fused.params.values()])
        for flat, tensors in zip(self._memory, self._state.memory.values(), strict=True):
            chain.from_flat(layout, flat, tensors)

    def _rate(self, step: int) -> float:
        run = self._run
        return learning_rate(
            run.schedule, run.optimizer.lr, step, self._steps * run.train.epochs, self._steps
        )

    def _row(self, step: int) -> list[float]:
        """What the update reads of a step."""
        lr, options = self._rate(step), self._run.optimizer.options
        beta1, beta2 = options.get("beta1", 0.0), options.get("beta2", 0.0)
        decay = 1.0 - lr * self._run.optimizer.weight_decay
        return [lr, 1.0 - beta1 ** (step + 1), 1.0 - beta2 ** (step + 1), decay]


def fits(split: object, device: torch.device) -> bool:
    """Whether a split can lie on the device beside the step."""
    if not isinstance(split, MemorySplit) or device.type != "cuda":
        return False
    free, _ = torch.cuda.mem_get_info(device)
    return split.images.numel() * split.images.element_size() <= free * _MOST_BYTES
