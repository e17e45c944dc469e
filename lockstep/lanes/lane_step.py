"""One step of a user's own loop: lanes forward and backward, their mean over all workers, the update.

Nothing of the state changes before all lanes are summed and found finite. So a step that lost a worker is
simply done again by the others: the loop over its lanes then yields further lanes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.comm.group import Group
from lockstep.comm.tree import worker_lanes
from lockstep.errors import LockstepError, WorkersDiffer
from lockstep.kernels.keyed_seed import seed_all
from lockstep.kernels.structure import describe
from lockstep.lanes.lane_loader import GlobalBatch
from lockstep.lanes.lane_sums import NUMBERS, USED, LaneSums, refuse_not_finite
from lockstep.lanes.script import Script
from lockstep.lanes.step_reduction import Means
from lockstep.measure.machine_fingerprint import lane_hash

_LOSS, _MOVE = 0, 1  # places in the vector of numbers; those that the script logs come after them


class LaneStep:
    """`with session.step() as step`: sums gradients over the lanes of all workers; its end updates."""

    def __init__(self, script: Script, optimizers: Sequence[Any], scaler: Any) -> None:
        self._script, self._optimizers, self._scaler = script, list(optimizers), scaler
        self._params = _unique(p for o in optimizers for g in o.param_groups for p in g["params"])
        self._values: dict[str, float] | None = None
        self._means: Means | None = None
        self._skipped = self._in_lane = False
        self._logged: dict[str, Tensor] = {}  # of the present lane

    def __enter__(self) -> LaneStep:
        self._script.begin_step(self.lanes_of)  # first, since it refuses a step inside another one
        self._guards = [optimizer.register_step_pre_hook(_refuse_update) for optimizer in self._optimizers]
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._script.end_step()
        for guard in self._guards:
            guard.remove()
        if kind is None and not self._skipped:
            if self._means is None:
                raise LockstepError(
                    "a step without lanes: inside `with session.step()`, loop over the batch to its end"
                )
            self._commit(self._means)
        self._script.objects.drop_gradients()

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Call `loss.backward()`; a lane may have several losses, each a mean over its samples."""
        if not self._in_lane:
            raise LockstepError("step.backward: call it inside `for lane in batch`, once for each loss")
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            what = describe(loss) + (" without a gradient" if isinstance(loss, Tensor) else "")
            raise LockstepError(
                f"step.backward got {what}: give the loss of the lane, one number computed from the model by "
                "torch's functions"
            )
        scaled = self._scaler.scale(loss) if self._scaler else loss
        scaled.backward(**options)
        self._loss += loss.detach().double()
        self._has_loss = True

    def log(self, **values: Tensor | float) -> None:
        """Note numbers of a lane; `step[name]` is their mean over all lanes, after the loop over them."""
        if not self._in_lane:
            raise LockstepError(
                "step.log: call it inside `for lane in batch`; it takes the values of one lane"
            )
        if "loss" in values:
            raise LockstepError("step.log: 'loss' is the sum of what step.backward got; take another name")
        for name, value in values.items():
            if not isinstance(value, Tensor | int | float) or (
                isinstance(value, Tensor) and value.numel() != 1
            ):
                raise LockstepError(f"step.log: {name} is {describe(value)}: give one number")
            noted = value.detach() if isinstance(value, Tensor) else torch.tensor(float(value))
            self._logged[name] = noted.double().to(self._script.device).reshape(())

    @property
    def lane(self) -> int:
        """The number of the present lane, for keys of random numbers; inside `for lane in batch`."""
        if not self._in_lane:
            raise LockstepError("step.lane: known inside `for lane in batch`")
        return self._number

    @property
    def loss(self) -> float:
        """The sum of a lane's losses, as the mean over all lanes."""
        return self["loss"]

    def __getitem__(self, name: str) -> float:
        if self._values is None:
            raise LockstepError(f"step['{name}'] is known after the loop over the batch's lanes")
        return self._values[name]

    def lanes_of(self, batch: GlobalBatch) -> Iterator[Any]:
        """Yield this worker's lanes, then compute the mean over all lanes; more lanes if a worker is lost."""
        if self._means is not None or self._skipped:
            raise LockstepError("one loop over lanes in each step: begin another step for another loop")
        rounds = self._script.rounds
        recorded = rounds.skip("step")
        if recorded is not None:
            self._values, self._skipped = recorded, True
            for optimizer in self._optimizers:
                optimizer._opt_called = True  # else a schedule would warn that it comes before the update
            for parameter in self._params:  # the script may look at gradients; they are dropped at the end
                parameter.grad = torch.zeros_like(parameter)
            return
        yield from rounds.passes(lambda group: self._run(group, batch))
        assert self._values is not None
        rounds.record("step", self._values)

    def _run(self, group: Group, batch: GlobalBatch) -> Iterator[Any]:
        script = self._script
        entered, is_cpu = script.rounds.entered, script.device.type == "cpu"
        sums = LaneSums(group, script.reductions, self._params, script.buffers, entered, checks_ints=is_cpu)
        try:
            yield from self._run_lanes(group, batch, sums)
        finally:
            sums.restore_buffers()  # also if a worker was lost while a lane was computed

    def _run_lanes(self, group: Group, batch: GlobalBatch, sums: LaneSums) -> Iterator[Any]:
        script = self._script
        where = script.seed, script.rounds.cursor.step
        if script.rounds.is_mixed and group.size > 1:
            yield from self._prove(group, batch, sums)
        own = worker_lanes(script.lanes, group.size, group.rank)
        for number, lane in zip(own, batch.read(group.size, group.rank), strict=True):
            yield from self._lane(number, lane, where)
            if not self._has_loss and any(p.grad is not None for p in self._params):
                raise LockstepError("call step.backward(loss) in place of loss.backward()")
            if not self._has_loss:
                raise LockstepError(
                    f"lane {number} had no step.backward(loss): every lane counts in the mean, so call it in "
                    "each; a loss times 0 changes nothing but counts"
                )
            sums.add(self._logged, torch.stack([self._loss, self._move(), *self._logged.values()]))
            script.objects.drop_gradients()
            script.look_for_hidden_state()
        self._means, self._names = sums.finish(), list(self._logged)
        seed_all(script.device, "after", *where)
        self._take(self._means)

    def _lane(self, number: int, lane: Any, where: tuple[int, int]) -> Iterator[Any]:
        """Let the script compute one lane."""
        script = self._script
        script.objects.drop_gradients()
        self._loss, self._logged = torch.zeros((), dtype=torch.float64, device=script.device), {}
        seed_all(script.device, "lane", *where, number)
        self._in_lane, self._has_loss, self._number = True, False, number
        try:
            yield lane
        finally:
            self._in_lane = False

    def _prove(self, group: Group, batch: GlobalBatch, sums: LaneSums) -> Iterator[Any]:
        """Lane 0 by every worker, compared: a state that was not set up, or another machine, shows here."""
        script = self._script
        yield from self._lane(0, batch.read_lane(0), (script.seed, script.rounds.cursor.step))
        grads = [p.grad for p in self._params if p.grad is not None]
        mine = lane_hash([self._loss, *grads, *script.buffers.all()])
        sums.restore_buffers()
        for rank, theirs in enumerate(group.all_gather_bytes(mine.encode())):
            if theirs.decode() != mine:
                raise WorkersDiffer(
                    f"worker {rank} computes lane 0 to other bits than worker {group.rank}: something that "
                    "the step uses differs between them; give every module that is used to session.setup, "
                    "seed what the script itself draws, as its data, and start all workers with the same "
                    "files, packages and kind of machine"
                )
        script.rounds.is_mixed = False

    def _move(self) -> Tensor:
        wants = float(self._script.rounds.wants_to_move)
        return torch.tensor(wants, dtype=torch.float64, device=self._script.device)

    def _take(self, means: Means) -> None:
        """Set the means as gradients, so that the script may clip them before the step ends."""
        numbers, used = means.numbers[NUMBERS].tolist(), means.numbers[USED].tolist()
        self._values = {"loss": numbers[_LOSS], **dict(zip(self._names, numbers[2:], strict=True))}
        self._script.rounds.moves = numbers[_MOVE] > 0
        for parameter, grad, share in zip(self._params, means.grads, used, strict=True):
            parameter.grad = grad if share else None
        if not any(used):
            raise LockstepError(
                "no parameter of the step's optimizers got a gradient: call step.backward(loss) in every lane"
            )

    @torch.no_grad()
    def _commit(self, means: Means) -> None:
        """Update, unless a value is not finite; a gradient scaler leaves such a step out by itself."""
        script = self._script
        if not self._scaler:
            grads = [p.grad for p in self._params if p.grad is not None]
            where, loss = f"step {script.rounds.cursor.step}", means.numbers[NUMBERS][_LOSS]
            refuse_not_finite(where, loss, [*grads, *means.floats], self._tensor_names)
        script.buffers.set(means.floats, means.ints)
        for optimizer in self._optimizers:
            with torch.enable_grad():
                self._scaler.step(optimizer) if self._scaler else optimizer.step()
        if self._scaler:
            self._scaler.update()
        script.rounds.cursor.step += 1
        script.trace(self._values or {})

    def _tensor_names(self) -> list[str]:
        names = self._script.objects.parameters()
        grads = [f"the gradient of {names[p]}" for p in self._params if p.grad is not None]
        return [*grads, *(f"buffer {name}" for name in self._script.buffers.float_names())]


def _refuse_update(optimizer: Any, arguments: Any, options: Any) -> None:
    raise LockstepError(
        f"{type(optimizer).__name__}.step: leave it out; the end of `with session.step()` updates"
    )


def _unique(params: Any) -> list[Tensor]:
    return list({id(p): p for p in params if p.requires_grad}.values())
