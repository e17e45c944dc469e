"""The reducer: starts each bucket's exchange as soon as its gradients are complete, in a fixed order."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial

from torch import Tensor

from lockstep.comm.background import BackgroundThread
from lockstep.comm.bucket import Bucket, ReducedTensor, split
from lockstep.comm.compress.compressed_bucket import CompressedBucket
from lockstep.comm.compress.feedback import Feedback
from lockstep.comm.compress.feedback_bucket import FeedbackBucket
from lockstep.comm.compress.low_rank_bucket import LowRankBucket
from lockstep.comm.group import Group
from lockstep.comm.shard.scatter import ScatteredBucket
from lockstep.comm.shard.shard_block import ShardBlock
from lockstep.comm.tree import Leaf

BUCKET_MB = 25.0
Shard = tuple[ShardBlock, Sequence[int]]  # a block, and the indices of its entries


class Reducer:
    """Computes the means of a fixed list of tensors over the lanes of all workers, in every step.

    A step is `begin`, an `add` for every lane or subtree of lanes, and `finish`. During the last lane or
    subtree, `put` takes single tensors as soon as they are known, so that a full bucket is exchanged while
    other tensors are still computed.
    """

    def __init__(
        self,
        group: Group,
        lanes: int,
        entries: Sequence[ReducedTensor],
        bucket_mb: float = BUCKET_MB,
        overlap: bool = True,
        shards: Sequence[Shard] = (),
        feedback: Feedback | None = None,
    ) -> None:
        """Of the entries of a shard each worker gets only pieces; they are exchanged before the others.

        So are those whose names are in `feedback`: they travel compressed.
        """
        self.overlaps = overlap and group.size > 1
        self._entries, self._lanes, self._group = list(entries), lanes, group
        self._bucket_mb, self._shards, self._feedback = bucket_mb, shards, feedback
        self._compresses: bool | None = None  # not laid out yet
        self._buckets: list[Bucket] = []
        self._background: BackgroundThread[Leaf] | None = (
            BackgroundThread("reduce", entries[0].like.device) if self.overlaps else None
        )
        self._ready = 0  # the next bucket to send; all before it are submitted
        self._futures: list[Future[Leaf]] = []

    def _lay_out(self, compresses: bool) -> None:
        """Make the buckets: of shards, of what is compressed, of the rest."""
        group, lanes, entries, feedback = self._group, self._lanes, self._entries, self._feedback
        self._compresses = compresses
        for bucket in self._buckets:
            bucket.close()
        self._compressed: list[FeedbackBucket] = []
        self._buckets = [
            ScatteredBucket(group, lanes, [entries[i] for i in indices], list(indices), block)
            for block, indices in self._shards
        ]
        if feedback and compresses:
            kind = LowRankBucket if feedback.compression.rank else CompressedBucket
            for indices in self._split([i for i, e in enumerate(entries) if e.name in feedback.shapes]):
                self._compressed.append(kind(group, lanes, [entries[i] for i in indices], indices, feedback))
        self._buckets += self._compressed
        taken = {i for bucket in self._buckets for i in bucket.indices}
        for indices in self._split([i for i in range(len(entries)) if i not in taken]):
            self._buckets.append(Bucket(group, lanes, [entries[i] for i in indices], indices))
        self._home = {i: (bucket, n) for bucket in self._buckets for n, i in enumerate(bucket.indices)}

    def _split(self, chosen: Sequence[int]) -> list[list[int]]:
        """The indices of each bucket of some of the entries."""
        found = split([self._entries[i] for i in chosen], self._bucket_mb * 1e6)
        return [[chosen[place] for place in places] for places in found]

    def begin(self, compresses: bool = True) -> None:
        """Start a step, and drop what is left of an unfinished one."""
        compresses = compresses and self._feedback is not None
        if compresses != self._compresses:
            self._lay_out(compresses)
        self._ready, self._futures, self._added, self.exchange_s = 0, [], 0, 0.0
        for bucket in self._buckets:
            bucket.begin()

    def watch(self, pick: int) -> None:
        """Keep one slice of this step for an audit; the random number `pick` selects bucket and worker."""
        plain = [bucket for bucket in self._buckets if type(bucket) is Bucket]
        pick, number = divmod(pick, len(plain))
        self._watched = plain[number]
        self._watched.watched = pick % self._group.size

    def find_slice(self) -> tuple[int, Tensor, Tensor]:
        """The watched slice, after `finish`: its owner, the means that arrived, the means summed again."""
        return self._watched.find_slice(self._group)

    def put(self, index: int, tensor: Tensor, height: int | None = None) -> None:
        """Take one tensor of the next lane or subtree before its `add`; the tensor is only read.

        Without a `height` it is the last lane or subtree. With one, its bucket must be of a shard.
        """
        bucket, place = self._home[index]
        assert not bucket.is_whole() and place not in bucket.leaf, "a tensor was put twice"
        bucket.leaf[place] = tensor
        if len(bucket.leaf) == len(bucket.indices):
            bucket.add_leaf(bucket.rest_height() if height is None else height)
            if self.overlaps:
                self._send()

    def add(self, tensors: Sequence[Tensor], height: int = 0) -> None:
        """Take all tensors of the next lane or subtree; those that `put` already took are skipped."""
        self._added += 1 << height
        for bucket in self._buckets:
            if bucket.num_lanes < self._added:
                for place, index in enumerate(bucket.indices):
                    bucket.leaf.setdefault(place, tensors[index])
                bucket.add_leaf(height)
        if self.overlaps:
            self._send()

    def finish(self) -> list[Tensor]:
        """The means over all lanes of all workers, in the order of the entries."""
        means: list[Tensor | None] = [None] * len(self._entries)
        for bucket in self._buckets:
            if self.overlaps:
                found = self._futures.pop(0).result()  # pop: a kept error would keep the group alive
            else:
                bucket.pack()
                found = bucket.reduce()
            bucket.arrive()
            for index, tensor in zip(bucket.indices, found, strict=True):
                means[index] = tensor
        return [mean for mean in means if mean is not None]

    def commit(self, bad: Tensor | None = None) -> None:
        """Remember what compression left out of this step, which is committed, unless it is `bad`.

        That is for steps that are captured as a graph: then everything stays at its place.
        """
        for bucket in self._compressed:
            bucket.commit(bad)

    @property
    def sent_bytes(self) -> int:
        """What this worker sent to others in the last step."""
        return sum(bucket.sent_bytes for bucket in self._buckets)

    def _reduce(self, bucket: Bucket) -> Leaf:
        start = time.perf_counter()
        found = bucket.reduce()
        self.exchange_s += time.perf_counter() - start  # of this step, while other things are computed
        return found

    def close(self) -> None:
        """End the background thread."""
        if self._background:
            self._background.close()

    def _send(self) -> None:
        """Start the exchange of complete buckets in their order, which is the same on every worker."""
        assert self._background is not None
        while self._ready < len(self._buckets) and self._buckets[self._ready].is_whole():
            bucket = self._buckets[self._ready]
            bucket.pack()
            self._futures.append(self._background.submit(partial(self._reduce, bucket)))
            self._ready += 1
