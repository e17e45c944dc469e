"""Chooses the kernel set that computes a model's lanes: by model, device and precision, never by timing.

Through the host, stock kernels compute one lane after another, which is the reference, or all lanes of a
small chain batched, if that gives the bits of the reference. On the device, fused or compiled kernels compute
whole steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import nn

from lockstep.comm.tree import subtrees
from lockstep.data.loader import Lanes
from lockstep.errors import ModelError, SpecError
from lockstep.kernels.loss import CrossEntropy, Loss, ValueLoss, WeightedCrossEntropy, WholeLoss
from lockstep.lower.batched import BatchedLanes, chain_of, same_bits
from lockstep.lower.lane_by_lane import LaneByLane
from lockstep.lower.program import DeviceLowering
from lockstep.spec import Run
from lockstep.spec.rule.loss_rule import write_weights
from lockstep.spec.sample.augmentation import mixes


@dataclass(frozen=True)
class Sample:
    """Reads a step's lanes, for their shapes, and remembers what earlier generations found."""

    read: Callable[[], Lanes]
    # heights of a worker's subtrees → whether its lanes give the bits of the reference when batched
    known: dict[tuple[int, ...], bool] = field(default_factory=dict)


def lower_for_host(
    model: nn.Module,
    loss: Loss,
    *,
    seed: int,
    half: torch.dtype | None,
    rounds: bool = False,
    sample: Sample | None = None,
) -> LaneByLane:
    """Choose how a model's lanes run with stock kernels.

    A small chain of stock layers runs batched if, on fixed values, it gives every bit of the reference.
    Batched lanes give sums over subtrees, so a wire type that `rounds` every node needs the reference.
    """
    reference = LaneByLane(model, loss, seed, half)
    chain = chain_of(model)
    if chain is None or sample is None or half or rounds or isinstance(loss, WholeLoss):
        return reference
    lanes, batched, known = sample.read(), BatchedLanes(model, loss, seed, chain), sample.known
    heights = tuple(height for _, height in subtrees(lanes.numbers))
    if heights not in known:
        small = lanes.num_lanes > 1 and batched.is_small(lanes)
        known[heights] = small and same_bits(batched, reference, lanes)
    return batched if known[heights] else reference


def lower_for_device(
    run: Run,
    model: nn.Module,
    loss: Loss,
    shape: tuple[int, int, int],
    device: torch.device,
    trains: bool = True,
    refusals: list[str] | None = None,
) -> DeviceLowering | None:
    """How whole steps run on the device; None for stock kernels through the host.

    `auto` takes fused kernels where they are known to be faster, else compiled ones if all lanes keep their
    bits at once; `refusals` get the reasons why not. Without `trains`, the result is for evaluation only.
    """
    wanted, found = run.kernels.set, None
    sets = _auto_sets(run, device) if wanted == "auto" else (wanted,)
    for kernels in sets:
        if kernels == "stock":
            continue
        try:
            found = _find_lowering(run, kernels, model, loss, shape, device, trains)
            break
        except ModelError as error:
            if wanted != "auto":
                also = " and train.sync_norm=false" if run.train.sync_norm else ""
                raise ModelError(f"kernels.set={wanted}: {error}: use kernels.set=auto{also}") from None
            if refusals is not None:
                refusals.append(str(error))
    if trains and run.kernels.table and not Path(run.kernels.table).is_file():
        raise SpecError(f"kernels.table={run.kernels.table}: there is no such file")
    if trains and run.train.sync_norm and not (found and found.program.shares_norms):
        fix = "" if wanted == "fused" else "kernels.set=fused with a resnet on a GPU, or "
        raise ModelError(
            "train.sync_norm=true: only residual networks with fused kernels have batch norms that see all "
            f"lanes: use {fix}train.sync_norm=false"
        )
    return found


def explain_stock(run: Run, loss: Loss, device: torch.device, refusal: str) -> str:
    """Why `auto` found only stock kernels on a GPU; empty where nothing is faster.

    `refusal` is what the compiled kernels say of the model.
    """
    if device.type != "cuda" or run.kernels.set != "auto":
        return ""
    if isinstance(loss, ValueLoss):
        return f"train.loss={run.train.loss} runs lane by lane with stock kernels, as all but cross_entropy"
    if not isinstance(loss, CrossEntropy | WeightedCrossEntropy):
        return ""
    if (steps := run.train.local_steps) > 1:
        return f"train.local_steps={steps} runs lane by lane with stock kernels here: each step takes longer"
    if mixed := mixes(run.data.augment):
        return f"data.augment={mixed} runs lane by lane with stock kernels here: without it, far faster"
    if sizes := run.data.options.get("sizes"):
        return f"data.sizes={sizes} runs lane by lane with stock kernels here: without it, far faster"
    return (
        f"the model runs lane by lane with stock kernels here, far slower than all lanes at once: {refusal}"
    )


def _auto_sets(run: Run, device: torch.device) -> tuple[str, ...]:
    """The kernel sets that `auto` tries, in order, by device and precision."""
    if device.type != "cuda" or run.train.local_steps > 1:
        return ()
    return ("compiled",) if run.train.precision == "fp32" else ("fused", "compiled")


def _find_lowering(
    run: Run,
    kernels: str,
    model: nn.Module,
    loss: Loss,
    shape: tuple[int, int, int],
    device: torch.device,
    trains: bool,
) -> DeviceLowering:
    if not find_spec("triton"):
        raise ModelError("the package triton is not installed")
    from lockstep.kernels.triton import is_usable

    if not is_usable(device):
        raise ModelError(f"its kernels do not run on {device.type}")
    if kernels == "fused" and run.train.recompute:
        raise ModelError("its layers have buffers of their own, and none is computed again (train.recompute)")
    if isinstance(loss, WeightedCrossEntropy):  # its weights are known now, also those of `balanced`
        run = replace(run, train=replace(run.train, class_weights=str(write_weights(loss.weights))))
    elif not isinstance(loss, CrossEntropy):
        raise ModelError("it has no loss but cross_entropy")
    if mixed := mixes(run.data.augment):
        raise ModelError(f"its loss takes no mixed labels, as of data.augment={mixed}")
    if trains and (sizes := run.data.options.get("sizes")):
        raise ModelError(f"its steps have images of one size, unlike data.sizes={sizes}")
    kernel_set = import_module(f"lockstep.lower.{kernels}")  # a folder for each
    found: DeviceLowering = kernel_set.find_lowering(run, model, shape, device, trains)
    return found
