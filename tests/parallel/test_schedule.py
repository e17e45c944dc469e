"""Schedules: every lane once forward and once backward, in order; how many wait; no stage waits for ever."""

import pytest

from lockstep.parallel.schedule import bubble, make_schedule

CASES = [(stages, lanes) for stages in (1, 2, 3, 4, 7) for lanes in (1, 2, 3, 8)]


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("stages", "lanes"), CASES)
def test_every_lane_passes_every_stage_in_order(name, stages, lanes):
    turns = [make_schedule(name, stage, stages, lanes) for stage in range(stages)]
    for stage, own in enumerate(turns):
        for kind in ("forward", "backward"):
            assert [turn.lane for turn in own if turn.kind == kind] == list(range(lanes))
        most = lanes if name == "gpipe" else min(stages - stage, lanes)
        assert lanes_in_flight(own) == most
    assert finishes(turns)


def lanes_in_flight(turns):
    """The most lanes whose activations wait for their backward pass at one time."""
    waiting = most = 0
    for turn in turns:
        waiting += 1 if turn.kind == "forward" else -1
        most = max(most, waiting)
    return most


def finishes(turns):
    """Whether stages that wait for their neighbours come to the end, each in its own order."""
    done, left = set(), [list(own) for own in turns]
    while any(left):
        before = len(done)
        for stage, own in enumerate(left):
            while own and needed(own[0], stage, len(turns)) <= done:
                turn = own.pop(0)
                done.add((turn.kind, turn.lane, stage))
        if len(done) == before:
            return False
    return True


def needed(turn, stage, stages):
    if turn.kind == "forward":
        return {("forward", turn.lane, stage - 1)} if stage else set()
    own = {("forward", turn.lane, stage)}
    return own | ({("backward", turn.lane, stage + 1)} if stage < stages - 1 else set())


def test_the_bubble_is_the_share_of_turns_that_a_stage_waits():
    assert bubble(1, 8) == 0 and bubble(2, 8) == 1 / 9 and bubble(4, 1) == 3 / 4
