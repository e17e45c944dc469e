"""Signals to a worker: the first asks it to stop, a second one ends it with the code of that signal."""

import os
import signal

import pytest
from world import in_threads

from lockstep.spec.start.stop_signal import WARNING, hold_warning
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


def test_after_a_warning_a_first_signal_lets_the_run_save():
    interrupt = Interrupt()
    interrupt._note(WARNING, None)
    interrupt._note(signal.SIGTERM, None)  # the job's time is over, or it is queued again
    interrupt._wished_at -= 2
    interrupt._note(WARNING, None)
    assert interrupt.signal == WARNING
    with pytest.raises(SystemExit):
        interrupt._note(signal.SIGTERM, None)


def test_a_warning_that_comes_early_is_kept_and_a_handler_of_the_user_stays():
    heard = []
    hold_warning()
    os.kill(os.getpid(), WARNING)
    with Interrupt() as interrupt:
        assert interrupt.signal == WARNING
    assert WARNING in signal.pthread_sigmask(signal.SIG_UNBLOCK, {WARNING}), "held until the next training"
    signal.signal(WARNING, lambda number, frame: heard.append(number))
    try:
        with Interrupt() as interrupt:
            os.kill(os.getpid(), WARNING)
        assert heard == [WARNING] and not interrupt.signal
    finally:
        signal.signal(WARNING, signal.SIG_DFL)


@pytest.mark.gloo
def test_workers_agree_on_the_signal():
    def agree(got):
        def work(group):
            interrupt = Interrupt()
            interrupt.signal = got[group.rank]
            return interrupt.agree(group)

        return in_threads(3, work)

    assert agree([None, signal.SIGTERM, WARNING]) == [WARNING] * 3
    assert agree([None, signal.SIGINT, None]) == [signal.SIGINT] * 3
    assert agree([None, None, None]) == [signal.SIGTERM] * 3
