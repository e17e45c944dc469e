"""A range of channels dealt to calls: a call makes whole groups, or a part of one."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class ChannelSegment:
    """Channels that one call makes, and the groups they are of."""

    own: range
    groups: range

    def across(self, size: int) -> slice:
        """The channels of these groups on the other side of the layer, where a group has `size`."""
        return slice(self.groups.start * size, self.groups.stop * size)

    def within(self, size: int) -> slice:
        """The own channels as counted in their group, which has `size`: all of them for whole groups."""
        return slice(self.own.start - self.groups.start * size, self.own.stop - self.groups[-1] * size)


def channel_segments(own: range, size: int) -> list[ChannelSegment]:
    """Cut a range of channels, `size` in a group, into whole groups and what lies before and after them."""
    if not own:
        return []
    before, after = -(-own.start // size), own.stop // size
    if before > after:  # it begins and ends inside one group
        return [ChannelSegment(own, range(after, before))]
    found = [
        ChannelSegment(range(own.start, before * size), range(before - 1, before)),
        ChannelSegment(range(before * size, after * size), range(before, after)),
        ChannelSegment(range(after * size, own.stop), range(after, after + 1)),
    ]
    return [segment for segment in found if segment.own]


def by_output(weight: Tensor, outs: range, size: int) -> Tensor:
    """The weights of a transposed layer's channels, `size` in a group, as a group's inputs by these channels.

    Those of whole groups lie one group below the other; others have this form already.
    """
    found = channel_segments(outs, size)
    groups = len(found[0].groups) if len(found) == 1 else 1
    return weight.reshape(groups, len(weight) // groups, *weight.shape[1:]).transpose(0, 1).flatten(1, 2)
