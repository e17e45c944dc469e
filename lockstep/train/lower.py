"""A model and a kernel set become something that runs the lanes of a step.

The choice is a lookup, never a timing. Operations that take all lanes at once are chosen here, and must
give the bits of the reference, which runs one lane after another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import nn

from lockstep.data.loader import Lanes
from lockstep.train.lane import LaneByLane
from lockstep.train.loss import Loss
from lockstep.train.together import Together, chain_of, same_bits


@dataclass(frozen=True)
class Sample:
    """A step's lanes, for their shapes; and what was found out before, as every generation has its number."""

    read: Callable[[], Lanes]
    known: dict[int, bool] = field(default_factory=dict)  # whether so many lanes give the reference's bits


def lower(
    model: nn.Module,
    loss: Loss,
    kernel_set: str,
    *,
    seed: int,
    bf16: bool,
    rounds: bool = False,
    sample: Sample | None = None,
) -> LaneByLane:
    """Choose how a model's lanes run.

    A small chain of stock layers runs all lanes together if, on fixed values, every bit is the reference's.
    With a wire type that `rounds` every node of the tree, only the reference does.
    """
    assert kernel_set == "stock", kernel_set
    reference = LaneByLane(model, loss, seed, bf16)
    chain = chain_of(model)
    if chain is None or sample is None or bf16 or rounds:
        return reference
    lanes, together, known = sample.read(), Together(model, loss, seed, chain), sample.known
    if lanes.num_lanes not in known:
        small = lanes.num_lanes > 1 and together.is_small(lanes)
        known[lanes.num_lanes] = small and same_bits(together, reference, lanes)
    return together if known[lanes.num_lanes] else reference


def resolve_kernels(kernel_set: str) -> str:
    """The kernel set that `auto` means: there is only the stock one."""
    return "stock" if kernel_set == "auto" else kernel_set
