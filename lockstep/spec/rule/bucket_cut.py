"""Which tensors travel together: neighbours of one kind, up to a number of bytes."""

from __future__ import annotations

from collections.abc import Hashable, Sequence


def cut_buckets(sizes: Sequence[int], kinds: Sequence[Hashable], most: float) -> list[list[int]]:
    """The places of each bucket's tensors, from their bytes and kinds; one that is larger has its own."""
    buckets: list[list[int]] = []
    filled = 0
    for place, (size, kind) in enumerate(zip(sizes, kinds, strict=True)):
        if not buckets or kind != kinds[buckets[-1][-1]] or filled + size > most:
            buckets.append([])
            filled = 0
        buckets[-1].append(place)
        filled += size
    return buckets
