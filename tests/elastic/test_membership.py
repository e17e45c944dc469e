"""Who is a worker and when the next generation begins; without clock, processes or network."""

import random

from lockstep.elastic.membership import Membership
from lockstep.spec import Launch, Run
from lockstep.spec.generation import Change, Generation


def job(names="abc", lanes=8, **options):
    membership = Membership(lanes, **options)
    for name in names:
        membership.add(name, 0, "host")
    return membership


def ready(membership, names, training=1):
    found = [membership.ready(name, training) and membership.next(1.0) for name in names]
    return [generation for generation in found if generation]


def test_the_first_generation_waits_for_all_that_start():
    membership = job()
    assert not ready(membership, "ab")
    (first,) = ready(membership, "c")
    assert first.workers == ("a", "b", "c") and first.number == 1 and not first.planned


def test_a_loss_begins_the_next_at_once_and_a_join_after_a_step():
    membership = job()
    ready(membership, "abc")
    membership.remove("a", "was killed", 5.0)
    lost = membership.next(6.0)
    assert lost.workers == ("b", "c") and not lost.planned and lost.since == 5.0
    assert lost.changes == (Change("lost", "a", "host", "was killed"),)
    membership.confirm(lost.number)
    membership.add("d", 0, "host")
    assert membership.next(7.0) is None, "it starts"
    (joined,) = ready(membership, "d")
    assert joined.workers == ("b", "c", "d") and joined.planned
    assert [str(change) for change in joined.changes] == ["worker d on host joined"]


def test_who_joins_waits_while_the_others_form_their_group_but_a_loss_does_not():
    membership = job()
    ready(membership, "abc")
    membership.come("a"), membership.come("b")
    membership.add("d", 0, "host")
    (second,) = ready(membership, "d")
    assert second.planned, "the first group is not formed yet, and nobody will form it"
    for name in "abcd":
        membership.come(name)
    membership.add("e", 0, "host")
    assert not ready(membership, "e")
    for name in "abc":
        membership.settle(name)
    assert membership.next(1.0) is None
    membership.settle("d")
    third = membership.next(1.0)
    assert third.workers == tuple("abcde") and third.planned
    for name in "abcde":
        membership.come(name)
    membership.add("f", 0, "host")
    assert not ready(membership, "f")
    membership.remove("a", "was killed", 1.0)
    fourth = membership.next(1.0)
    assert fourth.workers == tuple("bcdef") and not fourth.planned


def test_what_was_not_confirmed_is_told_again():
    membership = job()
    ready(membership, "abc")
    membership.remove("a", "was killed", 5.0)
    membership.next(5.0)
    membership.remove("b", "was killed", 6.0)
    again = membership.next(6.0)
    assert [change.worker for change in again.changes] == ["a", "b"] and again.since == 5.0


def test_a_loss_before_the_confirmation_keeps_its_time():
    membership = job()
    ready(membership, "abc")
    membership.remove("a", "was killed", 5.0)
    second = membership.next(5.0)
    membership.remove("b", "was killed", 6.0)
    membership.confirm(second.number)
    third = membership.next(8.0)
    assert [change.worker for change in third.changes] == ["b"] and third.since == 6.0


def test_more_workers_than_lanes_are_spares():
    membership = job("abc", lanes=2)
    (first,) = ready(membership, "abc")
    assert first.workers == ("a", "b")
    membership.remove("a", "was killed", 1.0)
    assert membership.next(1.0).workers == ("b", "c")


def test_a_node_that_leaves_is_no_loss():
    membership = job("ab")
    membership.add("x", 1, "other")
    ready(membership, "abx")
    membership.leave(1, 2.0)
    left = membership.next(2.0)
    assert left.workers == ("a", "b") and left.planned and left.changes[0].kind == "left"


def test_of_a_node_that_leaves_who_only_waits_is_told():
    membership = job("abc", lanes=2)
    membership.add("x", 1, "other")
    assert membership.leave(1, 1.0) == [("x", 0)] and not membership.ready("x", 1)
    membership.remove("x", "", 1.0)
    ready(membership, "abc")
    assert membership.leave(0, 2.0) == [("c", 1)], "the spare"


def test_too_few_workers_wait_and_halt():
    membership = job("ab", min_workers=2)
    ready(membership, "ab")
    membership.remove("a", "was killed", 1.0)
    assert membership.next(1.0) is None and membership.is_short
    last = membership.halt(2.0)
    assert last.halt and last.workers == ("b",)


def test_a_further_training_waits_for_those_of_the_one_before_and_takes_no_others():
    membership = job("ab")
    ready(membership, "ab")
    membership.finish(1)
    membership.add("c", 0, "host")
    assert not membership.ready("c", 1), "that training is over"
    assert not ready(membership, "a", training=2)
    (second,) = ready(membership, "b", training=2)
    assert second.workers == ("a", "b") and second.training == 2 and not second.changes


def test_the_same_workers_can_form_their_group_again():
    membership = job("ab")
    ready(membership, "ab")
    assert membership.next(1.0) is None
    membership.renew()
    again = membership.next(1.0)
    assert again.workers == ("a", "b") and again.number == 2 and not again.planned


def test_who_has_no_place_in_a_smaller_plan_hands_over_its_part_once():
    membership = job("abcd", sizes=(4, 1), is_split=True)
    ready(membership, "abcd")
    membership.confirm(1)
    membership.remove("d", "was killed", 1.0)
    second = membership.next(1.0)
    assert second.workers == ("a",) and second.givers == second.spares == ("b", "c")
    assert second.everyone == ("a", "b", "c") and len(second.nodes) == 3
    membership.remove("b", "was killed", 2.0)
    third = membership.next(2.0)
    assert third.workers == ("a",) and third.givers == ("c",) and not third.planned
    assert [change.worker for change in third.changes] == ["d", "b"]
    membership.confirm(third.number)
    membership.remove("c", "was killed", 3.0)
    assert membership.next(3.0) is None and not membership.changes, "it had nothing any more"


def test_a_giver_may_take_the_place_of_a_lost_worker():
    membership = job("abcd", sizes=(4, 1), is_split=True)
    ready(membership, "abcd")
    membership.remove("d", "was killed", 1.0)
    assert membership.next(1.0).workers == ("a",)
    membership.remove("a", "was killed", 2.0)
    third = membership.next(2.0)
    assert third.workers == ("b",) and third.givers == ("c",)


def test_a_node_that_leaves_hands_over_its_parts_and_is_no_spare():
    membership = job("ab", sizes=(4, 2), is_split=True)
    for name in "xy":
        membership.add(name, 1, "other")
    ready(membership, "abxy")
    membership.leave(1, 2.0)
    left = membership.next(2.0)
    assert left.workers == ("a", "b") and left.planned
    assert left.givers == ("x", "y") and not left.spares
    membership.remove("x", "", 3.0)
    assert membership.next(3.0) is None, "it has left as it was asked to"


def test_whatever_happens_a_generation_has_only_workers_that_live():
    rng = random.Random(0)
    for _ in range(50):
        membership, alive, count = Membership(4, sizes=(4, 3, 1), is_split=rng.random() < 0.5), set(), 0
        here, settled = set(), set()  # of the current generation
        for _ in range(90):
            what = rng.choice(["add", "ready", "remove", "confirm", "come", "come", "settle", "settle"])
            current = membership.current
            if what == "add":
                count += 1
                membership.add(str(count), rng.randrange(2), "host")
                alive.add(str(count))
            elif alive and what == "ready":
                membership.ready(rng.choice(sorted(alive)), 1)
            elif alive and what == "remove":
                gone = rng.choice(sorted(alive))
                alive.discard(gone)
                membership.remove(gone, "was killed", 1.0)
            elif what == "confirm":
                membership.confirm(membership.number)
            elif current and what == "come":
                here.add(name := rng.choice(current.everyone))
                membership.come(name)
            elif current and what == "settle" and here >= set(current.everyone):
                settled.add(name := rng.choice(current.workers))
                membership.settle(name)
            found = membership.next(1.0)
            if found:
                is_forming = current and here >= set(current.everyone) and not settled >= set(current.workers)
                assert not (found.planned and is_forming)
                here, settled = set(), set()
                assert set(found.workers) <= alive and len(found.workers) <= 4
                assert set(found.everyone) <= alive
                assert len(set(found.everyone)) == len(found.everyone) == len(found.nodes)
                assert Generation.load(found.dump()) == found
        current = membership.current
        assert current is None or membership.next(1.0) is None


def test_of_workers_that_share_lanes_as_many_go_on_as_come_out():
    sizes = Launch(plan="channel=2").sizes(8, 4)
    membership = job("abcde", min_workers=min(sizes), sizes=sizes)
    (first,) = ready(membership, "abcde")
    assert first.workers == ("a", "b", "c", "d") and first.spares == ("e",)
    membership.remove("b", "was killed", 1.0)
    assert membership.next(1.0).workers == ("a", "c", "d", "e")
    membership.remove("a", "was killed", 2.0)
    left = membership.next(2.0)
    assert left.workers == ("c", "d") and left.spares == ("e",)
    membership.remove("c", "was killed", 3.0)
    assert membership.next(3.0).workers == ("d", "e")
    membership.remove("d", "was killed", 4.0)
    assert membership.next(4.0) is None and membership.is_short


def test_who_goes_on_does_not_depend_on_who_has_which_part():
    launch = Launch(plan="data=1,pipeline=2,channel=2", fallbacks=("data=1,pipeline=2",))
    membership = job("abcd", min_workers=2, sizes=launch.sizes(4, 8), is_split=launch.splits_state(Run()))
    (first,) = ready(membership, "abcd")
    assert first.workers == ("a", "b", "c", "d")
    membership.remove("d", "was killed", 1.0)
    left = membership.next(1.0)
    assert left.workers == ("a", "b") and left.spares == left.givers == ("c",)
