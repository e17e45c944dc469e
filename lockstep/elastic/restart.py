"""The restart policy: whether a lost worker is replaced, how often an hour, and after what wait."""

from __future__ import annotations

WINDOW_S = 3600.0
FIRST_S, MOST_S = 0.5, 8.0  # the others go on first: a new worker needs the cores that they need
_SOON_S = 10.0


class Restarts:
    """At most so many within an hour; where one worker after another dies soon, each comes later."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._replaced: list[float] = []  # when, within the window
        self._short: dict[int, int] = {}  # how many workers of a place in a row did not live long

    def wait_s(self, slot: int, lived_s: float, now: float) -> float | None:
        """After how long to replace a worker that was killed; None if too many were."""
        self._replaced = [when for when in self._replaced if now - when < WINDOW_S]
        if len(self._replaced) >= self._most:
            return None
        self._replaced.append(now)
        before = self._short.get(slot, 0) if lived_s < _SOON_S else 0
        self._short[slot] = before + 1
        return min(FIRST_S * 2.0**before, MOST_S)
