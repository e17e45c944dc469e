"""What a launcher was asked by signals: a batch system's warning, and wishes that it should stop."""

from __future__ import annotations

import signal

from lockstep.spec.start.stop_signal import WARNING


class StopRequests:
    """Signals in the order they came; a first wish after a warning changes nothing, so saving goes on."""

    def __init__(self) -> None:
        self._signals: list[signal.Signals] = []

    def __bool__(self) -> bool:
        return bool(self._signals)

    def note(self, number: int) -> bool:
        """Note a signal; True if it is the first warning or the first wish, and so has to be passed on."""
        is_new = not self.num_wishes and (number != WARNING or not self._signals)
        self._signals.append(signal.Signals(number))
        return is_new

    @property
    def first(self) -> signal.Signals:
        return self._signals[0]

    @property
    def num_wishes(self) -> int:
        """How many of them are no warning: after the second one nobody waits for the state to be saved."""
        return sum(number != WARNING for number in self._signals)
