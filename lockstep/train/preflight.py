"""Whether a model, a loss, data and a Run go together, found out before any work starts; or why it failed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from lockstep.data import Store
from lockstep.data.loader import Lanes
from lockstep.errors import ModelError, OutOfMemory, SpecError
from lockstep.kernels.loss import Loss
from lockstep.lower.lane_by_lane import LaneByLane
from lockstep.spec import Run, Train


@torch.no_grad()
def check_output(model: nn.Module, store: Store, device: torch.device) -> None:
    """One image through the model, so that a module that does not fit is refused at once."""
    model.eval()
    try:
        output = model(torch.zeros(1, *store.shape, device=device))
    except (RuntimeError, TypeError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise ModelError(
            f"the model does not take images of shape {store.shape} (C, H, W): {first}"
        ) from None
    wanted = (1, len(store.classes))
    if not isinstance(output, torch.Tensor) or tuple(output.shape) != wanted:
        shape = tuple(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
        raise ModelError(
            f"the model gives {shape} for one image in eval mode; {store.name} has {len(store.classes)} "
            f"classes, so it must give {wanted}"
        )


def check_lane(model: nn.Module, loss: Loss, store: Store, run: Run, device: torch.device) -> None:
    """Two images through model, loss and backward, so that a loss that does not fit is refused at once."""
    size = min(run.train.batch // run.train.lanes, 2)
    images = torch.zeros(size, *store.shape, device=device)
    lanes = Lanes(images, torch.zeros(size, dtype=torch.int64, device=device), 1)
    reference = LaneByLane(model, loss, run.seed, bf16=False)
    try:
        (output,) = reference.run(lanes, 0)
    except Exception as error:
        if is_out_of_memory(error):
            return  # the loop says what would help
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        if "only for scalar outputs" in first:
            first = "the loss must be one number, the mean over its samples"
        raise ModelError(f"a step of this model and loss on {size} images a lane fails: {first}") from error
    finally:
        reference.release()
    if output.loss.dim():
        raise ModelError(f"the loss gives shape {tuple(output.loss.shape)}: it must be one number, a mean")


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error says that memory ran out, on a CPU or a GPU."""
    words = "allocate memory", "not enough memory"  # of torch's RuntimeError on a CPU, by system
    told = any(text in str(error) for text in words)
    return told or isinstance(error, (torch.OutOfMemoryError, MemoryError))


@contextmanager
def explain_memory(train: Train, device: torch.device, at_once: bool) -> Iterator[None]:
    """Let an error for want of memory say which settings need less, and one of a kernel which do without.

    `at_once`: a worker holds all its lanes.
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
        held = f"{train.batch // train.lanes} images a lane"
        fix = f"raise train.lanes={train.lanes} (smaller lanes)"
        if at_once:
            held, fix = (
                f"{held} and all lanes of a worker at once",
                "use kernels.set=stock (one lane at a time)",
            )
        raise OutOfMemory(
            f"out of memory on {device} with {held}: {fix}, lower train.batch={train.batch} or the image "
            "size, or use precision=bf16"
        ) from None


def warnings_of(run: Run, model: nn.Module, length: int, device: torch.device) -> list[str]:
    """What will train, but hardly as its user wishes."""
    found = []
    if run.train.precision == "bf16" and device.type == "cpu":
        found.append(
            "bf16 is slow on most CPUs, and very slow on one without bf16 of its own: use "
            "train.precision=fp32, which is another run"
        )
    left_out = length % run.train.batch
    if left_out > length // 5:
        found.append(
            f"every epoch leaves out {left_out} of {length} images, all that do not fill a batch: "
            f"lower train.batch, which is {run.train.batch}"
        )
    if run.schedule.warmup_epochs >= run.train.epochs:
        found.append(
            f"the whole run is warm-up (schedule.warmup_epochs={run.schedule.warmup_epochs:g}): "
            "the rate ends at its highest: set schedule.warmup_epochs=0 or raise train.epochs"
        )
    per_lane = run.train.batch // run.train.lanes
    has_norm = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
    if has_norm and per_lane < 16:
        found.append(
            f"batch norm over {per_lane} samples a lane (train.batch={run.train.batch} / "
            f"train.lanes={run.train.lanes}) is noisy: use 16 or more"
        )
    return found
