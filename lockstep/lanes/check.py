"""Checks a model before it is trained by several workers: computes its lanes as one worker and as several.

All of it runs in one process. Each worker is a copy of the model, which computes its own lanes only. So what
a model keeps outside of its parameters and buffers, or draws from a generator of its own, shows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.comm.tree import tree_sum, worker_lanes
from lockstep.errors import ModelError
from lockstep.kernels.keyed_seed import generators_kept, seed_all
from lockstep.kernels.numerics import plain_torch, prepare_device
from lockstep.kernels.structure import as_float, leaves, map_tensors
from lockstep.lanes.lane_sampler import check_lanes
from lockstep.lanes.objects import Buffers, check_module
from lockstep.measure.hidden_state import HiddenState
from lockstep.measure.operation_recorder import Operation, OperationRecorder

LossOf = Callable[[Any, Any], Tensor]  # of the model and one lane
_RATE = 0.01


def check(
    model: nn.Module,
    batch: Any,
    loss: LossOf | None = None,
    *,
    lanes: int = 4,
    workers: Sequence[int] = (2, 3, 4),
    steps: int = 2,
) -> str:
    """Where the bits of a training would depend on the number of workers; an empty text if nowhere.

    A few steps with one batch are computed by one worker, once more by one, and by several. The text names
    the first operation whose result differs. `loss(model, lane)` gives the loss of a lane, which has the
    structure of `batch`; by default the first part of it goes through the model. The model is not changed.
    An operation that torch knows to be not deterministic is an error.
    """
    check_lanes(lanes)
    if not isinstance(model, nn.Module) or not any(p.requires_grad for p in model.parameters()):
        raise ModelError("lanes.check: give a module with parameters that are trained")
    check_module(model, "lanes.check")
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    trial = _Trial(model, _split(batch, lanes), loss or _square, steps, device)
    with plain_torch(), generators_kept(device), _explain_refusal():
        prepare_device(device.type, threads=1)
        alone = trial.run(1)
        for number in (1, *(count for count in workers if 1 < count <= lanes)):
            again = trial.run(number)
            found = _first_difference(alone, again)
            if found:
                how = f"with {number} workers" if number > 1 else "when it is computed again"
                return f"{found} differs {how}: {again.explain(number)}"
    return f"{alone.numbers[0]}; register it as a buffer" if alone.numbers else ""


@contextmanager
def _explain_refusal() -> Iterator[None]:
    """Torch itself refuses operations that it knows to be not deterministic."""
    try:
        yield
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        raise ModelError(f"lanes.check: {str(error).split(',')[0]}: take another operation") from error


@dataclass
class _Record:
    """The operations of every lane of every step, and what the models keep outside of their state."""

    lanes: dict[tuple[int, int], list[Operation]]
    hidden: list[str]
    numbers: list[str]  # those of `hidden` that are plain numbers, which may matter later

    def explain(self, workers: int) -> str:
        if self.hidden:
            return f"{self.hidden[0]}; register it as a buffer, or make it a function of the input"
        if workers == 1:
            return (
                "it is not deterministic, or draws from a generator of its own; draw from torch's, Python's "
                "or NumPy's global one, which are seeded for each lane"
            )
        return (
            "it depends on what this worker computed before: keep such state in buffers, and draw from "
            "torch's, Python's or NumPy's global generator"
        )


@dataclass(frozen=True)
class _Trial:
    model: nn.Module
    parts: list[Any]
    loss: LossOf
    steps: int
    device: torch.device

    def run(self, workers: int) -> _Record:
        """Train a few steps; each worker's lanes by a copy of the model of its own."""
        copies = [copy.deepcopy(self.model).train() for _ in range(workers)]
        for one in copies:
            self._fill_caches(one)
        record, watches = _Record({}, [], []), [HiddenState({"model": one}) for one in copies]
        counts = [HiddenState({"model": one}, tensors=False) for one in copies]
        for step in range(self.steps):
            grads: list[list[Tensor]] = []
            floats: list[list[Tensor]] = []
            ints: list[Tensor] = []
            for rank, one in enumerate(copies):
                buffers = Buffers({"model": one})
                before = [buffer.clone() for buffer in buffers.all()]
                for lane in worker_lanes(len(self.parts), workers, rank):
                    record.lanes[step, lane] = self._lane(one, step, lane)
                    record.hidden += watches[rank].look()
                    record.numbers += counts[rank].look()
                    _check_ints(buffers, lane, ints)
                    grads.append([_gradient(p) for p in one.parameters()])
                    floats.append([buffer.clone() for buffer in buffers.floats()])
                    buffers.restore(before)
            _update(copies, grads, floats)
        return record

    def _fill_caches(self, model: nn.Module) -> None:
        """Compute a lane that does not count: a module may keep tensors from its first call."""
        buffers = Buffers({"model": model})
        before = [buffer.clone() for buffer in buffers.all()]
        self._lane(model, 0, 0)
        buffers.restore(before)

    def _lane(self, model: nn.Module, step: int, lane: int) -> list[Operation]:
        model.zero_grad(set_to_none=True)
        seed_all(self.device, "lane", step, lane)
        part = map_tensors(Tensor.clone, self.parts[lane])
        recorder = OperationRecorder()
        with recorder, recorder.modules(model):
            loss = self.loss(model, part)
            if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
                raise ModelError(
                    "lanes.check: loss(model, lane) must give one number, a tensor computed from the model"
                )
            if not loss.isfinite():
                raise ModelError(f"lanes.check: the loss of lane {lane} is {loss.item()}: give another batch")
            loss.backward()  # type: ignore[no-untyped-call]
        return recorder.operations


def _first_difference(one: _Record, other: _Record) -> str:
    for (step, lane), mine in one.lanes.items():
        theirs = other.lanes[step, lane]
        for a, b in zip(mine, theirs, strict=False):
            if a != b:
                where = f" in {a.module}" if a.module else " in the loss or the backward pass"
                return f"step {step}, lane {lane}: {a.name}{where}"
        if len(mine) != len(theirs):
            return f"step {step}, lane {lane}: the number of operations"
    return ""


def _check_ints(buffers: Buffers, lane: int, first: list[Tensor]) -> None:
    """Refuse integer buffers that differ between lanes; `first` gets those of the first lane."""
    first += [] if first else [buffer.clone() for buffer in buffers.ints()]
    for name, mine, theirs in zip(buffers.int_names(), buffers.ints(), first, strict=True):
        if not torch.equal(mine, theirs):
            raise ModelError(
                f"lanes.check: integer buffer '{name}' differs between lanes 0 and {lane}, so it has no "
                "mean: make it a function of the step, or a float"
            )


@torch.no_grad()
def _update(copies: list[nn.Module], grads: list[list[Tensor]], floats: list[list[Tensor]]) -> None:
    """One step of gradient descent on every copy, by the means over all lanes."""
    share = 1.0 / len(grads)
    for one in copies:
        for number, parameter in enumerate(one.parameters()):
            mean = tree_sum(torch.stack([lane[number] for lane in grads])) * share
            parameter.sub_(mean, alpha=_RATE)
        for number, buffer in enumerate(Buffers({"model": one}).floats()):
            buffer.copy_(tree_sum(torch.stack([lane[number] for lane in floats])) * share)


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()


def _square(model: Any, lane: Any) -> Tensor:
    """A loss for any outputs, if none is given: the mean of their squares."""
    outputs = model(lane[0] if isinstance(lane, list | tuple) else lane)
    parts = [part.square().mean() for part in leaves(as_float(outputs)) if part.is_floating_point()]
    return torch.stack(parts).sum()


def _split(batch: Any, lanes: int) -> list[Any]:
    """Equal parts of a batch."""
    sizes = {len(tensor) for tensor in leaves(batch) if tensor.dim()}
    if len(sizes) != 1 or next(iter(sizes)) % lanes or not next(iter(sizes)):
        raise ModelError(
            f"lanes.check: the tensors of the batch have {sorted(sizes)} samples: all must have as many, and "
            f"a multiple of lanes={lanes}"
        )
    size = next(iter(sizes)) // lanes
    return [
        map_tensors(lambda tensor, n=n: tensor[n * size : (n + 1) * size] if tensor.dim() else tensor, batch)  # type: ignore[misc]
        for n in range(lanes)
    ]
