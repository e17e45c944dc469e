"""A model of whose parameters every worker keeps a share, and gathers a block while it computes with it.

Workers along `data` gather the same blocks in the same order, whatever their lanes: a worker with a lane less
than others gathers for it all the same. The next block is gathered while one is in use.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.comm.background import BackgroundThread
from lockstep.comm.group import Group
from lockstep.comm.shard.scatter import gather_share
from lockstep.comm.shard.shard_block import ShardBlock
from lockstep.comm.shard.share import Share
from lockstep.errors import LockstepError
from lockstep.parallel.shard.sharded_model import ShardedModel
from lockstep.spec.plan import Plan

Use = tuple[int, ...]  # the blocks that one call needs


class GatheredModel(ShardedModel):
    """The parameters have memory only while a call uses them; in between they keep their shape."""

    def __init__(
        self,
        model: nn.Module,
        names: Sequence[Sequence[str]],
        group: Group,
        replicas: int = 1,
        values: Mapping[str, Tensor] | None = None,
        blocks: Sequence[ShardBlock] = (),
    ) -> None:
        super().__init__(model, names, group, replicas, values, blocks)
        self._home = {name: number for number, block in enumerate(names) for name in block}
        self._strides = {n: (p if values is None else values[n]).stride() for n, p in self._params.items()}
        self._device = next((p.device for p in self._params.values()), None)
        self._source = self.share
        self._here: dict[int, Tensor] = {}  # the flat buffers of blocks that are whole now
        self._numbers: dict[int, int] = {}  # of these blocks, by the address of their memory
        self._coming: deque[tuple[int, Future[Tensor] | None]] = deque()
        self._learned: list[Use] | None = None
        self.backward_uses: list[Use] | None = None  # known after the first backward pass
        self._thread: BackgroundThread[Tensor] = BackgroundThread("gather", self._device)
        for parameter in self._params.values():
            _free(parameter)

    def blocks_of(self, names: Iterable[str]) -> Use:
        """The blocks that hold these parameters."""
        return tuple(sorted({self._home[name] for name in names if name in self._home}))

    def begin(self, uses: Iterable[Use] = ()) -> None:
        """Start with no block; `uses` are those of all calls to come, each gathered while one before is used.

        Without `uses` a block is gathered when it is used.
        """
        self.use_nothing()
        assert not self._coming, "blocks were expected and not used"
        here: Use = ()
        for use in filter(None, uses):
            self._coming += [(number, None) for number in use if number not in here]
            here = use
        self._look_ahead()

    def use(self, blocks: Use) -> None:
        """Have exactly these blocks whole; a collective."""
        if self._learned is not None and blocks and (not self._learned or self._learned[-1] != blocks):
            self._learned.append(blocks)
        if not blocks or set(blocks) == set(self._here):
            return
        for number in [number for number in self._here if number not in blocks]:
            self._drop(number)
        for number in [number for number in blocks if number not in self._here]:
            flat = self._here[number] = self._take(number)
            self._numbers[flat.data_ptr()] = number
            for name, first in zip(self.share.names[number], self.share.blocks[number].starts, strict=False):
                self._params[name].data = flat.as_strided(self.share.shapes[name], self._strides[name], first)

    def pass_over(self, uses: Iterable[Use]) -> None:
        """Take part in what others need for a lane that this worker does not have."""
        for use in uses:
            self.use(use)

    def use_nothing(self) -> None:
        """Keep only the share."""
        for number in list(self._here):
            self._drop(number)

    @contextmanager
    def forward_pass(self) -> Iterator[None]:
        """Save no parameter for the backward pass, which gathers it again."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield

    @contextmanager
    def backward_pass(self) -> Iterator[None]:
        """Learn which blocks it uses, the first time."""
        if self.backward_uses is None:
            self._learned = []
        try:
            yield
        finally:
            if self._learned is not None:
                self.backward_uses, self._learned = self._learned, None

    @contextmanager
    def averaged(self, averages: Share | None, ema: dict[str, Tensor]) -> Iterator[None]:
        """Give the model its averaged weights, if the run keeps them; restore its own at the end."""
        self.use_nothing()
        with super().averaged(averages, ema):
            yield
        self.use_nothing()

    def _write(self, share: Share) -> None:
        self.use_nothing()
        self._source = share

    def close(self) -> None:
        """End the thread that gathers."""
        self._thread.close()

    def _look_ahead(self) -> None:
        """Have one block on its way."""
        if self._coming and self._coming[0][1] is None:
            number = self._coming[0][0]
            self._coming[0] = number, self._thread.submit(lambda: self._gather(number))

    def _take(self, number: int) -> Tensor:
        if not self._coming:
            return self._thread.submit(lambda: self._gather(number)).result()
        expected, coming = self._coming.popleft()
        if expected != number:
            raise LockstepError(
                f"block {number} of the parameters is used where block {expected} was: with shard=parameters "
                "a model must compute alike in every step"
            )
        assert coming
        found = coming.result()
        self._look_ahead()
        return found

    def _gather(self, number: int) -> Tensor:
        """The flat buffer of a block, in which each parameter lies with the strides that it had."""
        block, names = self._source.blocks[number], self._source.names[number]
        flat = gather_share(self._group, block, self._source.flats[number])
        for name, first, value in zip(names, block.starts, block.views(flat), strict=False):
            if value.stride() != self._strides[name]:
                flat.as_strided(value.shape, self._strides[name], first).copy_(value.clone())
        return flat

    def _drop(self, number: int) -> None:
        self._numbers.pop(self._here.pop(number).data_ptr())
        for name in self.share.names[number]:
            _free(self._params[name])

    def _pack(self, tensor: Tensor) -> Any:
        number = self._numbers.get(tensor.untyped_storage().data_ptr())
        return tensor if number is None else (number, tensor.shape, tensor.stride(), tensor.storage_offset())

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        number, *form = packed
        self.use((number,))
        return self._here[number].as_strided(*form)


def share_model(
    model: nn.Module, names: Sequence[Sequence[str]], group: Group, plan: Plan, uncut: bool
) -> ShardedModel:
    """A model in shares, as a plan asks; `uncut`: none of its parameters is in two of them."""
    known, shares = dict(model.named_parameters()), group.size // plan.replicas
    shapes = [tuple(known[name].shape for name in own) for own in names]
    blocks = [ShardBlock(own, shares, whole=True) for own in shapes] if uncut else ()
    kind = GatheredModel if plan.shard == "parameters" else ShardedModel
    return kind(model, names, group, plan.replicas, blocks=blocks)


@torch.no_grad()
def _free(parameter: Tensor) -> None:
    """Keep a parameter's shape without its memory."""
    parameter.data = parameter.new_zeros(()).expand(parameter.shape)
