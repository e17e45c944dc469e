"""Which killed workers are replaced, and after how long."""

from lockstep.elastic.restart import MOST_S, WINDOW_S, Restarts


def test_at_most_so_many_within_an_hour():
    restarts, day = Restarts(3), 24 * 3600
    for hours in range(0, 200 * 24, 12):  # months of a worker lost every twelve hours
        assert restarts.wait_s(0, 12 * 3600, hours * 3600.0) == 0.5
    now = 201.0 * day
    assert [restarts.wait_s(slot, 60, now + slot) for slot in range(4)] == [0.5, 0.5, 0.5, None]
    assert restarts.wait_s(3, 60, now + WINDOW_S - 1) is None
    assert restarts.wait_s(3, 60, now + WINDOW_S) == 0.5
    assert Restarts(0).wait_s(0, 60, now) is None


def test_where_workers_die_soon_each_comes_later():
    restarts = Restarts(100)
    assert [restarts.wait_s(0, 1.0, 0.0) for _ in range(7)] == [0.5, 1, 2, 4, 8, 8, MOST_S]
    assert restarts.wait_s(1, 1.0, 0.0) == 0.5, "another place"
    assert restarts.wait_s(0, 30.0, 0.0) == 0.5, "one that has lived"
    assert restarts.wait_s(0, 1.0, 0.0) == 1
