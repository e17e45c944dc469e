"""What buckets that travel compressed share: lanes come one by one, and what is left out is remembered."""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.comm.bucket import Bucket, ReducedTensor
from lockstep.comm.compress.feedback import Feedback
from lockstep.comm.group import Group
from lockstep.comm.tree import Leaf


class FeedbackBucket(Bucket):
    """Entries whose gradients are compressed lane by lane."""

    def __init__(
        self,
        group: Group,
        lanes: int,
        entries: list[ReducedTensor],
        indices: list[int],
        feedback: Feedback,
    ) -> None:
        self._group, self._feedback = group, feedback
        self._names = [entry.name for entry in entries]
        super().__init__(group, lanes, entries, indices)

    @torch.no_grad()
    def add_leaf(self, height: int) -> None:
        """Take the collected gradients of a lane."""
        assert height == 0, "lanes are compressed one by one"
        grads = [self.leaf[place] for place in range(len(self.indices))]
        self._add_lane(self._own.start + self.num_lanes, grads)
        self._left -= 1
        self.leaf.clear()

    def pack(self) -> None:
        """Nothing is left to copy; the exchange may begin."""
        if not self._alone:
            self._mark_filled()

    @torch.no_grad()
    def reduce(self) -> Leaf:
        """The means over all lanes, as compression leaves them; of one worker, too."""
        return self._exchange_means() if self._alone else super().reduce()

    def commit(self, bad: Tensor | None) -> None:
        """Take over what this step left out, once all of the step is committed; see `Reducer.commit`."""
        raise NotImplementedError

    def _add_lane(self, lane: int, grads: list[Tensor]) -> None:
        """Compress a lane's gradients, and add what that gives to the tree."""
        raise NotImplementedError
