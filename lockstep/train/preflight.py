"""Checks before any work that model, loss, data and Run go together; explains out-of-memory errors."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.data import Store
from lockstep.data.loader import Lanes
from lockstep.errors import ModelError, OutOfMemory, SpecError
from lockstep.kernels.loss import Loss, ValueLoss, WholeLoss
from lockstep.kernels.numerics import half_type
from lockstep.kernels.structure import describe, leaves, place
from lockstep.lower.lane_by_lane import LaneByLane
from lockstep.models.freeze import trains_norms
from lockstep.spec import Launch, Run
from lockstep.spec.rule.local_steps import explain_local_steps

_NAMED = 4  # parameters that a message names


class _Trial(LaneByLane):
    """A lane that refuses outputs and losses which would not train as the user expects."""

    unused: tuple[str, ...] = ()  # parameters that the loss does not reach
    samples = 0  # of the lane

    def _find_loss(self, outputs: Any, labels: Any) -> Tensor:
        if not isinstance(self.loss, WholeLoss) or isinstance(self.loss, ValueLoss):
            _check_heads(outputs, hasattr(self.model, "aux_weight"))
        elif any(part.dim() == 0 or len(part) != self.samples for part in leaves(outputs)):
            raise ModelError(
                f"the model gives {describe(outputs)} for {self.samples} images: every output needs a row "
                "for each image; compute means and sums in the loss"
            )
        loss = super()._find_loss(outputs, labels)
        if not isinstance(loss, Tensor):
            raise ModelError(
                f"the loss gives a {type(loss).__name__}: it must give a tensor, without .item()"
            )
        if not any(part.requires_grad for part in leaves(outputs)):
            raise ModelError(
                "the model's output is cut off from its parameters, so nothing would be trained: forward "
                "must not use .detach(), .data, .numpy() or torch.no_grad() on the way"
            )
        if loss.grad_fn is None:
            raise ModelError(
                "the loss is cut off from the model's output, so nothing would be trained: compute it from "
                "the outputs by torch functions, without .detach(), .item() or torch.tensor()"
            )
        return loss

    def _gradients(self, outputs: list[Tensor], *rest: object, **options: object) -> list[Any]:
        found = torch.autograd.grad(outputs, list(self.params.values()), allow_unused=True)
        pairs = list(zip(self.params.items(), found, strict=True))
        self.unused = tuple(name for (name, _), grad in pairs if grad is None)
        return [torch.zeros_like(p) if grad is None else grad for (_, p), grad in pairs]


def _check_heads(outputs: Any, has_weight: bool) -> None:
    """Accept one tensor of logits; or a tuple of them, if the module says how its auxiliary heads count."""
    parts = outputs if isinstance(outputs, tuple) else (outputs,)
    if parts and all(isinstance(part, Tensor) for part in parts) and (len(parts) == 1 or has_weight):
        return
    what = (
        f"{type(outputs).__name__} of {len(outputs)}"
        if hasattr(outputs, "__len__")
        else type(outputs).__name__
    )
    raise ModelError(
        f"the model gives a {what} in training, and one loss is trained: let forward give one tensor of "
        "logits; or a tuple of such tensors, and set aux_weight on the module (model.aux_weight = 0.3), by "
        "which the losses of all but the first count"
    )


def check_lane(model: nn.Module, loss: Loss, store: Store, run: Run, device: torch.device) -> list[str]:
    """Run two images through model, loss and backward, so that a loss that does not fit is refused at once.

    Returns warnings.
    """
    size = min(run.train.batch // run.train.lanes, 2)
    images, labels = torch.zeros(size, *store.shape, device=device), torch.zeros(size, dtype=torch.int64)
    if isinstance(loss, WholeLoss):
        labels = store.train.read(torch.arange(size))[1]
    lanes = Lanes(images, place(labels, device), 1)
    trial = _Trial(model, loss, run.seed, half=None)
    trial.samples = size
    try:
        (output,) = trial.run(lanes, 0)
    except ModelError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            return []  # `explain_memory` says later what would help
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        if "only for scalar outputs" in first:
            first = "the loss must be one number, the mean over its samples"
        raise ModelError(f"a step of this model and loss on {size} images a lane fails: {first}") from error
    finally:
        trial.release()
    if output.loss.dim():
        raise ModelError(f"the loss gives shape {tuple(output.loss.shape)}: it must be one number, a mean")
    return _explain_unused(trial.unused, len(trial.params))


def _explain_unused(unused: tuple[str, ...], count: int) -> list[str]:
    """A warning about parameters without a gradient; an error if no parameter has one."""
    names = ", ".join(f"'{name}'" for name in unused[:_NAMED])
    names += f" and {len(unused) - _NAMED} more" if len(unused) > _NAMED else ""
    if len(unused) == count:
        raise ModelError(
            f"the loss depends on none of the model's {count} trainable parameters ({names}), so nothing "
            "would be trained: let forward use them"
        )
    fix = "let forward use them, or set requires_grad_(False) on them"
    return [f"the loss does not depend on {names}: only weight decay changes them; {fix}"] if unused else []


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error says that memory ran out, on a CPU or a GPU."""
    words = "allocate memory", "not enough memory"  # of torch's RuntimeError on a CPU, by system
    told = any(text in str(error) for text in words)
    return told or isinstance(error, (torch.OutOfMemoryError, MemoryError))


@contextmanager
def explain_memory(run: Run, device: torch.device, at_once: bool, in_parts: bool = False) -> Iterator[None]:
    """Turn an out-of-memory error, or one of a Triton kernel, into one that says which settings help.

    `at_once`: a worker holds all its lanes in memory at once; `in_parts`: a plan cuts the model already.
    """
    try:
        yield
    except Exception as error:
        if type(error).__module__.startswith("triton."):
            first = str(error).strip().splitlines()[0]
            raise SpecError(
                f"a fused kernel does not run on {device}: {first}; use kernels.set=stock, or tiles for this "
                "device: lockstep bench tune"
            ) from error
        if not is_out_of_memory(error):
            raise
        images = run.train.batch // run.train.lanes
        held = f"{images} image{'s' * (images > 1)} a lane" + " and all lanes of a worker at once" * at_once
        *fixes, last = _less_memory(run, at_once, in_parts)
        fix = f"{', '.join(fixes)}, or {last}" if fixes else last
        raise OutOfMemory(f"out of memory on {device} with {held}: {fix}") from None


def _less_memory(run: Run, at_once: bool, in_parts: bool) -> Iterator[str]:
    """What makes a run smaller, but for what it has already or does not go with it."""
    train = run.train
    if at_once:
        yield "use kernels.set=stock (one lane at a time)"
    elif train.batch > train.lanes:
        yield f"raise train.lanes={train.lanes} (smaller lanes)"
    batch = f"train.batch={train.batch} or " if train.batch > train.lanes else ""
    yield f"lower {batch}the image size"
    if not half_type(train.precision):
        yield "use train.precision=bf16"
    cut = in_parts or train.bands * train.slices > 1
    if not (cut or train.recompute or run.kernels.set == "fused"):
        yield "set train.recompute=true"
    if not (in_parts or train.recompute or train.compress != "none" or train.local_steps > 1):
        yield "give the layers to several workers (--plan pipeline=2)"


def warnings_of(run: Run, model: nn.Module, length: int, device: torch.device) -> list[str]:
    """Warnings about settings that train, but probably not as the user wants."""
    found = explain_local_steps(run.train.local_steps, length // run.train.batch)
    if half_type(kind := run.train.precision) and device.type == "cpu":
        text = f"{kind} is slow on most CPUs, and very slow on one without native {kind}"
        found.append(f"{text}: use train.precision=fp32, which is another run")
    batches = [stage.batch for stage in run.train.stages]
    worst = max(batches, key=lambda batch: length % batch)
    if (left_out := length % worst) > length // 5:
        which = "every epoch" if len(batches) == 1 else f"every epoch with batch {worst}"
        found.append(
            f"{which} leaves out {left_out} of {length} images, all that do not fill a batch: "
            f"lower train.batch, which is {run.train.batches}"
        )
    if run.schedule.warmup_epochs >= run.train.epochs:
        found.append(
            f"the whole run is warm-up (schedule.warmup_epochs={run.schedule.warmup_epochs:g}): "
            "the rate ends at its highest: set schedule.warmup_epochs=0 or raise train.epochs"
        )
    per_lane = min(batches) // run.train.lanes
    if trains_norms(model) and per_lane < 16:
        found.append(
            f"batch norm over {per_lane} samples a lane (train.batch={min(batches)} / "
            f"train.lanes={run.train.lanes}) is noisy: use 16 or more"
        )
    return found


def explain_crowding(launch: Launch, run: Run, device: torch.device) -> list[str]:
    """A warning if the workers' threads are more than the CPU's cores."""
    cores, world = len(os.sched_getaffinity(0)), launch.world
    workers, threads = world.local_size if world else 1, run.train.threads
    if world and world.launcher == "mpirun" and threads <= cores:
        cores = os.cpu_count() or cores  # mpirun may bind each worker to some cores
    if device.type != "cpu" or workers * threads <= cores:
        return []
    return [
        f"{workers} workers with {threads} thread{'s' * (threads > 1)} each on {cores} core"
        f"{'s' * (cores > 1)} get in each other's way: the bits are the same, but fewer workers are as fast"
    ]
