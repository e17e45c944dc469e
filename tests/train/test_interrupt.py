"""Signals to a worker: the first asks it to stop, a second one ends it with the code of that signal."""

import signal

import pytest

from lockstep.train.interrupt import Interrupt


@pytest.mark.parametrize(
    ("number", "ending"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)
def test_a_second_signal_ends_the_run_at_once(number, ending):
    interrupt = Interrupt()
    interrupt._note(number, None)
    interrupt._note(number, None)  # at once: a terminal and a launcher sent the same one
    assert interrupt.signal == number
    interrupt._wished_at -= 2
    with pytest.raises(ending) as found:
        interrupt._note(number, None)
    assert number == signal.SIGINT or found.value.code == 143
