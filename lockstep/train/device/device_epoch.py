"""The steps of an epoch on the device, as CUDA graphs: how many are started ahead, and the exchange.

Alone, a worker starts steps ahead and reads their results while the next ones run, so the device never
waits for the host. In a group every step waits for the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from lockstep.comm.group import Group
from lockstep.comm.tree import worker_lanes
from lockstep.errors import GroupLost
from lockstep.kernels.cuda_graph import capture, run_first
from lockstep.lower.device_lanes import DeviceLanes
from lockstep.lower.lane_by_lane import LaneByLane
from lockstep.runs.train_state import TrainState
from lockstep.spec import Launch
from lockstep.train.device.device_step import DeviceStep
from lockstep.train.device.step_exchange import StepExchange
from lockstep.train.result import StepResult
from lockstep.train.setup import Setup
from lockstep.train.step import NotFinite, Requests


@dataclass(frozen=True)
class _Batch:
    """Steps that were started together; their results are copied to the host as soon as they are done."""

    first: int
    stop: int
    status: Tensor
    results: Tensor
    done: torch.cuda.Event | None  # None on a CPU, where steps are done when they return


class DeviceEpochs:
    """Runs the steps of an epoch; the state's tensors are up to date only where `run` says so."""

    def __init__(self, step: DeviceStep, group: Group, exchange: StepExchange | None, graph: bool) -> None:
        self._step, self._group, self._exchange = step, group, exchange
        self._waited_s = 0.0  # for data, by the steps that are reported so far
        device, self._together, self._graph = step.device, group.size > 1, graph
        self._captured: bool | None = None  # whether the step that is captured is compressed
        # with sync_norm a step exchanges statistics, which not every backend can do inside a CUDA graph
        cut = step.run.train.sync_norm and self._together
        if self._together and exchange:
            run_first(step.dry_run, device, not cut)
            self._compute = capture(exchange.compute, device, graph and not cut)
            self._commit = capture(lambda: step.commit(exchange.sums, 1.0), device, graph)
        else:
            self._capture_whole()

    def _capture_whole(self) -> None:
        """Capture the only worker's step, once more when compression begins."""
        step, exchange = self._step, self._exchange
        if exchange and self._captured == exchange.compresses:
            return
        self._captured = bool(exchange and exchange.compresses)
        run = partial(exchange.run_alone, self._captured) if exchange else step.run_alone
        run_first(partial(step.dry_run, run), step.device)
        self._whole = capture(run, step.device, self._graph)

    def run(
        self, until: int, is_due: Callable[[int], bool], requests: Requests, synced: bool = False
    ) -> Iterator[StepResult]:
        """Run the steps of the current epoch before step `until`, or until a request to stop or to move.

        The state's tensors are up to date after the last one, after a step that `is_due`, and after every
        step if `synced`; and when the group is lost.
        """
        step = self._step
        if self._exchange and not self._together:
            self._capture_whole()
        step.begin()
        offset = step.state.step - step.state.step_in_epoch
        ends = [n for n in range(1, until + 1) if synced or n == until or is_due(offset + n)]
        try:
            yield from self._in_group(ends, requests) if self._together else self._alone(ends, requests)
        except (NotFinite, GroupLost):
            step.flush()
            raise

    def close(self) -> None:
        """End the background threads."""
        self._step.images.close()
        if self._exchange:
            self._exchange.close()

    @property
    def sent_bytes(self) -> int:
        """What this worker sent to others in the last step."""
        return self._exchange.sent_bytes if self._exchange else 0

    def _alone(self, ends: list[int], requests: Requests) -> Iterator[StepResult]:
        """Start steps ahead of their results, but none beyond a step in `ends` before that is reported."""
        step = self._step
        at, clock = step.state.step_in_epoch, time.perf_counter()
        told: _Batch | None = None
        while True:
            stop, move = requests()
            limit = next((n for n in ends if n > (told.first if told else at)), at)
            begun = None
            if at < limit and not (stop or move):
                begun = self._start(at, min(at + step.images.ahead, limit))
                at = begun.stop
            if told:
                if told.done:
                    told.done.synchronize()
                if not begun:
                    step.flush()
                now = time.perf_counter()
                seconds, clock = (now - clock) / (told.stop - told.first), now
                yield from self._tell(told, seconds, *((stop, move) if not begun else (False, False)))
                clock = clock if begun else time.perf_counter()
            if not begun and (stop or move or at == ends[-1]):
                return
            told = begun

    def _start(self, first: int, stop: int) -> _Batch:
        for number in range(first, stop):
            self._step.images.feed(number)
            self._whole()
        left = self._step.status, self._step.results[first:stop]
        if not self._step.status.is_cuda:
            return _Batch(first, stop, left[0].clone(), left[1].clone(), None)
        status, results = (torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in left)
        status.copy_(left[0], non_blocking=True)
        results.copy_(left[1], non_blocking=True)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(torch.cuda.current_stream(self._step.device))
        return _Batch(first, stop, status, results, done)

    def _tell(self, batch: _Batch, seconds: float, stop: bool, move: bool) -> Iterator[StepResult]:
        """Yield the results of completed steps; each moves the state's cursor."""
        cursor, bad, _ = batch.status.tolist()
        for number, (loss, right, skipped) in enumerate(batch.results.tolist(), batch.first):
            if bad and number >= cursor:
                raise NotFinite(loss)
            last = number == batch.stop - 1
            result = self._result(loss, right, bool(skipped))
            yield replace(result, stop=stop and last, move=move and last, seconds=seconds)

    def _in_group(self, ends: list[int], requests: Requests) -> Iterator[StepResult]:
        step, exchange, flushed = self._step, self._exchange, set(ends)
        assert exchange
        for number in range(step.state.step_in_epoch, ends[-1]):
            step.images.feed(number)
            self._compute()
            wishes = exchange.exchange(*requests())
            stop, move = (wishes > 0).tolist()  # waits until the exchange is over, or cut
            self._group.check()
            self._commit()
            cursor, bad, _ = step.status.tolist()
            loss, right, skipped = step.results[number].tolist()
            if bad and number >= cursor:
                raise NotFinite(loss)
            if not skipped:
                exchange.commit()
            result = replace(self._result(loss, right, bool(skipped)), stop=stop, move=move)
            if stop or move or number + 1 in flushed:
                step.flush()
            yield result

    def _result(self, loss: float, right: float, skipped: bool) -> StepResult:
        """What a step gives; it moves the state's cursor, and the scale as the device did."""
        (state, step), scale = (self._step.state, self._step), self._step.state.scale
        if scale:
            state.scale = scale.after(skipped, step.run.train.scale_growth)
        lr = step.rate(state.epoch * step.steps + state.step_in_epoch)
        state.step += 1
        state.step_in_epoch += 1
        waited_s, self._waited_s = step.images.waited_s - self._waited_s, step.images.waited_s
        return StepResult(
            loss,
            round(right * step.run.train.lanes),
            lr,
            waited_s=waited_s,
            scale=scale.value if scale else None,
            skipped=skipped,
        )


def make_device_epochs(
    setup: Setup, state: TrainState, fused: LaneByLane, group: Group, launch: Launch
) -> DeviceEpochs:
    """Build the steps that stay on the device."""
    assert isinstance(fused, DeviceLanes)
    own = worker_lanes(setup.run.train.lanes, group.size, group.rank)
    step = DeviceStep(setup.run, state, fused, setup.store.train, setup.augment(), own)
    train = setup.run.train
    # one worker sums by itself, unless its sums are rounded or compressed
    is_alone = group.size == 1 and train.wire == "fp32" and train.compress == "none"
    exchange = None if is_alone else StepExchange(step, group, launch)
    return DeviceEpochs(step, group, exchange, launch.graph and setup.device.type == "cuda")
