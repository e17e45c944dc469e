"""The means of one step over the lanes of all workers: gradients, numbers and buffers; and are they finite.

A gradient's path: backward → lane tree → bucket → group → lane tree → optimizer. Steps of `lockstep.train`
and steps of a user's own loop both sum their lanes here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.comm.bucket import ReducedTensor
from lockstep.comm.compress.feedback import Feedback
from lockstep.comm.group import Group
from lockstep.comm.reducer import BUCKET_MB, Reducer, Shard
from lockstep.errors import LockstepError
from lockstep.models.tensors import tensors_sha256

_INTEGER = (
    "buffer '{}' is an integer and differs between {}, so it has no mean: make it a function of the step, "
    "or a float"
)


@dataclass(frozen=True)
class Means:
    """What all lanes of a step give together; the same on every worker."""

    grads: list[Tensor]
    numbers: list[Tensor]
    floats: list[Tensor]  # the floating buffers
    ints: list[Tensor]  # the integer buffers, which are the same in every lane


@dataclass(frozen=True)
class Buckets:
    """How gradients travel: those in fp32 as `wire`, as many at once, or of `shards` only pieces, flat.

    Those whose `names` are in `feedback` are compressed.
    """

    wire: torch.dtype | None = None
    mb: float = BUCKET_MB
    overlap: bool = True
    shards: Sequence[Shard] = ()
    feedback: Feedback | None = None
    names: Sequence[str] = ()  # of the gradients


class StepReduction:
    """Sums lanes in the order of the lane tree, in one worker and between workers.

    A step is `begin`, an `add` for every lane or subtree of lanes, and `finish`. `put` takes single gradients
    of the last lane or subtree as soon as they are known.
    """

    def __init__(
        self,
        group: Group,
        lanes: int,
        like: Means,
        int_names: Sequence[str],
        buckets: Buckets | None = None,
    ) -> None:
        """`like` has an example of each tensor, its gradients in the order of the parameters."""
        buckets = buckets or Buckets()
        self._group, self._int_names = group, list(int_names)
        self._num_params, self._num_numbers = len(like.grads), len(like.numbers)
        self._checks_ints = self._ints_checked = False
        # from the last layer to the first, since a backward pass ends with the first
        names = buckets.names or [""] * len(like.grads)
        grads = [
            ReducedTensor(p, buckets.wire if p.dtype == torch.float32 else None, name)
            for p, name in zip(reversed(like.grads), reversed(names), strict=True)
        ]
        self.reducer = Reducer(
            # floating buffers beside the gradients, as their type is often the same: fewer buckets
            group,
            lanes,
            [*grads, *map(ReducedTensor, [*like.floats, *like.numbers])],
            buckets.mb,
            buckets.overlap,
            [(block, [len(grads) - 1 - i for i in indices]) for block, indices in reversed(buckets.shards)],
            buckets.feedback,
        )

    @property
    def overlaps(self) -> bool:
        """Whether `put` can start an exchange while the last lane is still computed."""
        return self.reducer.overlaps

    def begin(self, check_ints: bool = False, compresses: bool = True) -> None:
        """Start a step, and drop what is left of an unfinished one; the first step always checks integers."""
        self._checks_ints = check_ints or not self._ints_checked
        self._ints: list[Tensor] | None = None
        self.reducer.begin(compresses)

    def put(self, index: int, grad: Tensor, height: int | None = None) -> None:
        """Take the gradient of one parameter of the next lane or subtree before its `add`.

        Without a `height` it is the last one.
        """
        self.reducer.put(self._num_params - 1 - index, grad, height)

    def add(
        self,
        grads: Sequence[Tensor],
        numbers: Sequence[Tensor],
        floats: Sequence[Tensor],
        ints: Sequence[Tensor],
        height: int = 0,
    ) -> None:
        """Take the next lane, or the sums over the next subtree of lanes."""
        self.reducer.add([*reversed(grads), *floats, *numbers], height)
        if self._ints is None:
            self._ints = list(ints)
        elif self._checks_ints:
            for name, a, b in zip(self._int_names, self._ints, ints, strict=True):
                if not torch.equal(a, b):
                    raise LockstepError(_INTEGER.format(name, "lanes"))

    def finish(self) -> Means:
        """The means over all lanes of all workers; a collective."""
        means, count = self.reducer.finish(), self._num_params
        last = len(means) - self._num_numbers
        return Means(means[:count][::-1], means[last:], means[count:last], self._ints or [])

    def check_ints(self) -> None:
        """Refuse integer buffers that differ between workers; a collective, in steps that check integers."""
        if not self._checks_ints:
            return
        pairs = zip(self._int_names, self._ints or [], strict=True)
        hashes = {name: tensors_sha256({name: value}) for name, value in pairs}
        for rank, text in enumerate(self._group.all_gather_bytes(json.dumps(hashes).encode())):
            differs = [name for name, value in json.loads(text).items() if value != hashes[name]]
            if differs:
                raise LockstepError(_INTEGER.format(differs[0], f"workers {self._group.rank} and {rank}"))
        self._ints_checked = True

    def close(self) -> None:
        """End the background thread."""
        self.reducer.close()


def read_finite(
    numbers: Sequence[Tensor], tensors: Sequence[Tensor], grads: Sequence[Tensor] = ()
) -> tuple[list[float], bool, bool]:
    """The values of `numbers`; whether these and every element of `tensors` are finite; those of `grads`."""
    ends = [[number.double() for number in numbers], _extremes(tensors), _extremes(grads)]
    values = torch.stack([value for group in ends for value in group]).tolist()
    count = len(ends[0]) + len(ends[1])
    are_finite = [all(map(math.isfinite, part)) for part in (values[:count], values[count:])]
    return values[: len(numbers)], are_finite[0], are_finite[1]


def _extremes(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Numbers that are finite if and only if every element of the tensors is."""
    filled = [tensor for tensor in tensors if tensor.numel()]
    if filled and filled[0].is_cuda:
        return [norm.double() for norm in torch._foreach_norm(filled, float("inf"))]
    # a CPU takes ten times as long for that norm, and half as long for a sum, which may only overflow
    sums = [tensor.sum().double() for tensor in filled]
    if all(map(math.isfinite, sums)):
        return sums
    return [end.double() for tensor in filled for end in torch.aminmax(tensor)]
