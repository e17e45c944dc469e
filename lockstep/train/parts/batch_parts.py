"""What hangs on the samples of a lane: kernels, grid, fingerprint; a batch that grows needs each anew.

`setup` finds them for every batch of a run before its first step. A lane's other rules, such as how an image
is changed or which weights there are, know nothing of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from lockstep.data import Store
from lockstep.kernels.loss import Loss
from lockstep.lower.choose import lower_for_device
from lockstep.lower.program import DeviceLowering
from lockstep.parallel.split.split_graph import SplitGraph
from lockstep.spec import Run
from lockstep.train.grid import find_numerics
from lockstep.train.preflight import explain_memory


@dataclass(frozen=True)
class BatchParts:
    """The parts of a run with one batch."""

    run: Run
    lowering: DeviceLowering | None  # of whole steps on the device; None: stock kernels through the host
    grid: SplitGraph | None  # if sums over pixels or outputs follow train.bands, train.slices
    numerics: dict[str, Any]  # the run's part of the fingerprint
    refusal: str = ""  # why steps do not run on the device, if `auto` found that they cannot
    batched: dict[tuple[int, ...], bool] = field(default_factory=dict)  # see `Sample.known`

    def facts(self) -> dict[str, Any]:
        """What the identity says of them."""
        return {**self.numerics, **(self.lowering.facts() if self.lowering else {})}


def find_batch_parts(
    run: Run,
    model: nn.Module,
    loss: Loss,
    store: Store,
    device: torch.device,
    *,
    is_own: bool,
    in_stages: bool,
) -> dict[int, BatchParts]:
    """The parts for each batch by the first epoch that has it; all of them run with the same kernel set."""
    found: dict[int, BatchParts] = {}
    for epochs, _ in run.train.stages:
        one, kernels = run.at(epochs.start), run.kernels
        if found:
            first = found[0].lowering
            kernels = replace(kernels, set=first.program.kernels if first else "stock")
        with explain_memory(one, device, True, in_stages):
            refusals = list[str]()
            lowering = lower_for_device(
                replace(one, kernels=kernels), model, loss, store.shape, device, refusals=refusals
            )
        with explain_memory(one, device, bool(lowering), in_stages):
            grid, numerics = find_numerics(
                one, model, loss, store, lowering, is_own=is_own, in_stages=in_stages
            )
        found[epochs.start] = BatchParts(one, lowering, grid, numerics, (refusals or [""])[-1])
    return found


def later_facts(found: dict[int, BatchParts]) -> dict[str, Any]:
    """The identity's entry for batches after the first; none if there is but one."""
    rows = [{"batch": parts.run.train.batch, **parts.facts()} for first, parts in found.items() if first]
    return {"by_batch": rows} if rows else {}
