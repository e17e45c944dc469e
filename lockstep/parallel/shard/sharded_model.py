"""A model whose parameters every worker has whole, while updates are shared: shard=optimizer, gradients.

A step reduces gradients into shares, updates the shares, and publishes them: all workers gather all blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lockstep.comm.bucket import ReducedTensor, split
from lockstep.comm.group import Group
from lockstep.comm.reducer import Shard
from lockstep.comm.shard.scatter import gather_share
from lockstep.comm.shard.shard_block import ShardBlock
from lockstep.comm.shard.share import Share
from lockstep.models.tensors import float_state, parameter_aliases, trainable

Places = dict[tuple[str, int], Tensor]  # pieces of tensors by name and first element


def blocks_by_size(model: nn.Module, bucket_mb: float) -> list[list[str]]:
    """The trained parameters in their order, in blocks of one kind and at most so many megabytes."""
    names, known = trainable(model), dict(model.named_parameters())
    return [
        [names[i] for i in block]
        for block in split([ReducedTensor(known[n]) for n in names], bucket_mb * 1e6)
    ]


def blocks_by_use(model: nn.Module, calls: Sequence[Sequence[str]], bucket_mb: float) -> list[list[str]]:
    """The trained parameters in the order of the calls that use them; those of one call stay in one block."""
    known = dict(model.named_parameters())
    left = dict.fromkeys(trainable(model))
    blocks: list[list[str]] = []
    filled = 0.0
    for call in [*calls, [*left]]:  # at the end what no call uses
        own = [name for name in call if name in left]
        if not own:
            continue
        size = sum(known[name].numel() * known[name].element_size() for name in own)
        kinds = {known[name].dtype for name in own}
        last = {known[blocks[-1][0]].dtype} if blocks else set()
        fits = kinds <= last and filled + size <= bucket_mb * 1e6
        for kind in [] if fits else sorted(kinds, key=str):
            blocks.append([name for name in own if known[name].dtype == kind])
            filled = size
        if fits:
            blocks[-1] += own
            filled += size
        for name in own:
            del left[name]
    return blocks


class ShardedModel:
    """The parameters of a model, and this worker's share of them, by blocks of names.

    Their values are the model's, or are read from `values`, a block at a time. Shares are even, or cut as
    `blocks` say.
    """

    def __init__(
        self,
        model: nn.Module,
        names: Sequence[Sequence[str]],
        group: Group,
        replicas: int = 1,
        values: Mapping[str, Tensor] | None = None,
        blocks: Sequence[ShardBlock] = (),
    ) -> None:
        self.model, self._group = model, group
        self._params = {name: p for name, p in model.named_parameters() if name in set().union(*names)}
        shares = group.size // replicas
        self.share = Share.cut(
            names,
            self._params if values is None else values,
            shares,
            group.rank % shares,
            parameter_aliases(model),
            blocks,
        )
        self.is_published = False  # whether the model has the values of the share

    def shards(self, params: Sequence[str]) -> list[Shard]:
        """The blocks for a reduction of the gradients of these parameters, by their indices."""
        index = {name: i for i, name in enumerate(params)}
        pairs = zip(self.share.blocks, self.share.names, strict=True)
        return [(block, [index[name] for name in names]) for block, names in pairs]

    def prepare(self) -> None:
        """Give the model what a step needs; a collective."""
        self.publish()

    def by_chunks(self, grads: Places) -> Places:
        """Pieces of gradients in whole chunks of 2¹⁶ elements, by which they are clipped; they are so."""
        return grads

    @torch.no_grad()
    def publish(self) -> None:
        """Give every worker the parameters that the shares hold, if they were updated; a collective."""
        if not self.is_published:
            self._write(self.share)
            self.is_published = True

    @contextmanager
    def averaged(self, averages: Share | None, ema: dict[str, Tensor]) -> Iterator[None]:
        """Give the model its averaged weights, if the run keeps them; restore its own at the end."""
        if averages is None:
            self.publish()
            yield
            return
        floats = float_state(self.model)
        live = [floats[name] for name in ema if name not in averages.shapes]
        before = [tensor.clone() for tensor in live]
        with torch.no_grad():
            torch._foreach_copy_(
                live, [v for n, v in ema.items() if n not in averages.shapes]
            ) if live else None
            self._write(averages)
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(live, before) if live else None
                self._write(self.share)
                self.is_published = True

    def _write(self, share: Share) -> None:
        """Gather a share of all parameters into the model."""
        for block, names, flat in zip(share.blocks, share.names, share.flats, strict=True):
            whole = gather_share(self._group, block, flat)
            for name, value in zip(names, block.views(whole), strict=True):
                self._params[name].detach().copy_(value)

    def close(self) -> None:
        """End what runs beside the model."""
