"""The restart policy: whether a lost worker is replaced, how often an hour, and after what wait."""

from __future__ import annotations

WINDOW_S = 3600.0
FIRST_S, MOST_S = 0.5, 8.0  # wait: a new worker would take CPU time from the others' recovery
_SOON_S = 10.0


class Restarts:
    """At most `most` replacements within an hour; if they keep dying soon, each next one comes later."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._replaced: list[float] = []  # times of replacements within the window
        self._short: dict[int, int] = {}  # slot → losses in a row, each soon after its start

    def wait_s(self, slot: int, lived_s: float, now: float) -> float | None:
        """How long to wait before a killed worker is replaced; None if too many were replaced already."""
        self._replaced = [when for when in self._replaced if now - when < WINDOW_S]
        if len(self._replaced) >= self._most:
            return None
        self._replaced.append(now)
        before = self._short.get(slot, 0) if lived_s < _SOON_S else 0
        self._short[slot] = before + 1
        return min(FIRST_S * 2.0 ** min(before, 10), MOST_S)
