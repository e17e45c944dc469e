"""Which lanes a worker owns, and of which whole subtrees of the lane tree they consist."""

from __future__ import annotations


def worker_lanes(lanes: int, workers: int, rank: int) -> range:
    """The range of lanes that a worker owns; the ranges of all workers are as even as possible."""
    return range(rank * lanes // workers, (rank + 1) * lanes // workers)


def subtrees(lanes: range) -> list[tuple[int, int]]:
    """The maximal aligned subtrees of a range of lanes as (first lane, height)."""
    found, first = [], lanes.start
    while first < lanes.stop:
        room = (lanes.stop - first).bit_length() - 1
        height = min(room, (first & -first).bit_length() - 1) if first else room
        found.append((first, height))
        first += 1 << height
    return found


def all_heights(lanes: int, workers: int) -> list[list[int]]:
    """The heights of every worker's maximal aligned subtrees."""
    every = [worker_lanes(lanes, workers, rank) for rank in range(workers)]
    return [[height for _, height in subtrees(own)] for own in every]
