"""Simulated steps: deterministic, and what closed forms say where these apply."""

import json
import math
import time
from dataclasses import replace
from itertools import product
from statistics import NormalDist, median

import pytest

from lockstep.errors import SpecError
from lockstep.parallel.schedule import bubble, make_schedule
from lockstep.planner.cost import predict
from lockstep.planner.deal_work import deal_work
from lockstep.planner.exchange_time import Ring, reduce_s, send_s
from lockstep.planner.simulation.event_trace import to_chrome
from lockstep.planner.simulation.step_events import simulate_step, stage_turns
from lockstep.planner.step_work import BucketWork, StageWork, StepWork
from lockstep.spec.cluster import Cluster, LinkRate, NetworkRate, NodeShape, WorkerSpeed
from lockstep.spec.plan import Plan, read_plan
from lockstep.spec.profile import LayerProfile, Profile
from lockstep.spec.run import Run

LINK, DATA = LinkRate(5.0, 20.0), Plan(data=8)
STAGE = StageWork(
    lanes=4, forward_s=0.01, backward_s=0.02, inside_s=0.0, send_bytes=0.0, update_s=0.003, gather_bytes=0.0,
    buckets=(BucketWork(25e6, 0.4), BucketWork(20e6, 0.7), BucketWork(5e6, 1.0)),
)  # fmt: skip
CALM = replace(STAGE, buckets=(), update_s=0.0)


def make_cluster(link=LINK, gb_s=10.0, **network):
    speed = WorkerSpeed("gpu", "a GPU", 80.0, 1000.0, {"fp32": 1e4})
    return Cluster("c", speed, NodeShape(8, link), NetworkRate(10.0, gb_s, **network))


def make_work(stage=STAGE, plan=DATA, overlaps=False, cluster=None, host_s=0.001, data_s=0.0):
    stages = stage if isinstance(stage, tuple) else (stage,) * plan.pipeline
    return StepWork(cluster or make_cluster(), plan, stages, host_s, data_s, 256, overlaps)


def exchange_s(work):
    ring = Ring(work.plan.data, work.plan.cells)
    return [reduce_s(work.cluster, ring, bucket.num_bytes) for bucket in work.stages[0].buckets]


def test_without_overlap_a_step_is_the_sum_of_its_parts():
    work = make_work(replace(STAGE, inside_s=0.002))
    parts = 4 * (0.01 + 0.02 + 0.002) + sum(exchange_s(work)) + 0.003 + 0.001
    assert simulate_step(work).mean_s == pytest.approx(parts, rel=1e-12)


def test_buckets_travel_beside_computing():
    work = make_work(overlaps=True)
    link = 0.0
    for bucket, seconds in zip(STAGE.buckets, exchange_s(work), strict=True):
        link = max(link, bucket.ready * 0.02) + seconds
    expected = 3 * 0.03 + 0.01 + max(link, 0.02) + 0.003 + 0.001
    assert simulate_step(work).mean_s == pytest.approx(expected, rel=1e-12)
    early = replace(STAGE, buckets=(BucketWork(1e6, 0.1), BucketWork(1e3, 0.5)))
    assert simulate_step(make_work(early, overlaps=True)).mean_s == pytest.approx(0.124, rel=1e-12)  # hidden


PLANS = ("data=16", "data=4,channel=4", "data=8,spatial=2", "data=16,layers=fc", "data=16,shard=optimizer",
         "data=16,shard=gradients", "data=16,shard=parameters", "data=8,pipeline=2,schedule=gpipe",
         "data=4,pipeline=4,schedule=gpipe")  # fmt: skip


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
@pytest.mark.parametrize("text", PLANS)
def test_the_closed_form_of_the_planner_is_simulated(text, kind):
    """On a GPU gradients travel beside the backward pass; in a pipeline the longest parts add up."""
    convs = [
        LayerProfile(f"conv{i}", "convolution", 1e8, 200_000, 10_000, 10_000, 32, 64, 1) for i in range(7)
    ]
    layers = (*convs, LayerProfile("fc", "fully connected", 2e7, 20_000_000, 10_000, 2000, channels=2000))
    profile = Profile("m", (3, 32, 32), 10, "fp32", "stock", layers)
    run, cluster = Run(), make_cluster()
    run = replace(run, train=replace(run.train, batch=256, lanes=64, bands=2))
    work = deal_work(
        run, profile, replace(cluster, worker=replace(cluster.worker, kind=kind)), read_plan(text)
    )
    total_s = predict(work).total_s
    found_s = simulate_step(work).mean_s
    if work.plan.pipeline == 1:
        assert found_s == pytest.approx(total_s, rel=1e-9)
    else:
        assert 0.88 * total_s < found_s < (1 + 1e-9) * total_s


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("parts", [(1, 1), (1, 1, 1, 1), (1, 1.2, 0.9, 0.8), (0.7, 1.3)])
def test_the_closed_form_of_a_pipeline_is_simulated(parts, overlaps):
    """With 1f1b a message may hold up the next lane, and a long stage hides others; no formula has that."""
    for schedule, low, high in (("gpipe", 1.0, 1.0), ("1f1b", 0.94, 1.02)):
        for send_bytes in (0.0, 1e6, 5e7):
            stages = tuple(
                replace(STAGE, lanes=8, forward_s=0.01 * part, backward_s=0.02 * part, send_bytes=send_bytes)
                for part in parts
            )
            work = make_work(stages, Plan(data=4, pipeline=len(parts), schedule=schedule), overlaps)
            ratio = simulate_step(work).mean_s / predict(work).total_s
            assert low - 1e-9 <= ratio <= high + 1e-9


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("stages", "lanes"), [(2, 2), (3, 8), (4, 1), (8, 16)])
def test_the_bubble_of_equal_stages_is_that_of_the_formula(schedule, stages, lanes):
    plan = Plan(data=2, pipeline=stages, schedule=schedule)
    done = simulate_step(make_work(replace(CALM, lanes=lanes), plan, host_s=0.0))
    assert done.mean_s == pytest.approx((lanes + stages - 1) * 0.03, rel=1e-12)
    for worker in {event.worker for event in done.events}:
        busy = sum(event.end_s - event.start_s for event in done.events if event.worker == worker)
        assert 1 - busy / done.mean_s == pytest.approx(bubble(stages, lanes))


def test_stages_take_turns_as_in_a_run():
    for schedule, stages, lanes in product(("1f1b", "gpipe"), (1, 2, 3, 7), (1, 2, 8)):
        for stage in range(stages):
            turns = make_schedule(schedule, stage, stages, lanes)
            assert stage_turns(schedule, stages - stage, lanes) == [(turn.kind, turn.lane) for turn in turns]


def test_one_lane_through_a_pipeline_waits_for_every_message():
    plan = Plan(data=1, pipeline=3)
    work = make_work(replace(CALM, lanes=1, send_bytes=1e6), plan, host_s=0.0)
    assert simulate_step(work).mean_s == pytest.approx(3 * 0.03 + 4 * send_s(work.cluster, 1, 1e6))


def test_a_link_sends_one_message_after_another():
    slow = make_cluster(LinkRate(0.0, 1e-3))  # a message takes 1 s, far longer than computing
    work = make_work(replace(CALM, lanes=4, send_bytes=1e6), Plan(data=1, pipeline=2, schedule="gpipe"),
                     cluster=slow, host_s=0.0)  # fmt: skip
    assert simulate_step(work).mean_s == pytest.approx(0.01 + 4 + 0.01 + 0.02 + 4 + 0.02, rel=0.02)


def test_workers_of_a_node_share_its_network():
    inside, across = Plan(data=4, pipeline=2), Plan(data=8, pipeline=2)
    cluster = make_cluster(LinkRate(0.0, 10.0), gb_s=10.0)
    message = replace(CALM, lanes=1, send_bytes=1e7)
    alone, shared = (
        simulate_step(make_work(message, plan, cluster=cluster)).mean_s for plan in (inside, across)
    )
    assert shared - alone == pytest.approx(2 * (8 - 1) * 1e7 / 10e9, rel=0.05)


def test_a_switch_with_too_few_lines_slows_what_leaves_it():
    fast, slow = (make_cluster(nodes_a_switch=2, oversubscription=over) for over in (1.0, 4.0))
    seconds = {
        (nodes, cluster.network.oversubscription): simulate_step(
            make_work(plan=Plan(data=8 * nodes), cluster=cluster)
        ).mean_s
        for nodes in (2, 4)
        for cluster in (fast, slow)
    }
    assert seconds[2, 1.0] == seconds[2, 4.0]
    sent = 2 * (3 / 4) * 50e6  # bytes of a node, all of which leave its switch at a quarter of the rate
    assert seconds[4, 4.0] - seconds[4, 1.0] == pytest.approx(3 * sent / 10e9)


def test_shares_are_scattered_and_parameters_gathered():
    whole = simulate_step(make_work()).mean_s
    stage = replace(STAGE, gather_bytes=50e6)
    shared = simulate_step(make_work(stage, Plan(data=8, shard="optimizer"))).mean_s
    assert shared == pytest.approx(whole, rel=0.01)  # all-reduce = reduce-scatter + all-gather


def test_lanes_that_all_exchange_wait_for_the_slowest_of_each():
    stage = replace(STAGE, inside_s=0.001)
    own, all_of_them = (
        simulate_step(make_work(stage, plan), spread=0.2, steps=50)
        for plan in (Plan(data=8, shard="optimizer"), Plan(data=8, shard="gradients"))
    )
    assert own.mean_s == pytest.approx(all_of_them.mean_s)  # the same worker is slow in a whole step
    waits = [event for event in all_of_them.events if event.kind == "inside" and event.label == "0"]
    assert len({event.start_s for event in waits}) == 2  # forward and backward, the same for all workers


def test_a_step_is_as_slow_as_its_images():
    assert simulate_step(make_work(data_s=5.0)).mean_s == 5.0


def test_the_same_seed_gives_the_same_steps():
    work = make_work(plan=Plan(data=16, pipeline=2, channel=2))
    first, again = (simulate_step(work, seed=3, spread=0.2, steps=20) for _ in range(2))
    assert first == again and len(set(first.seconds)) == 20
    assert simulate_step(work, seed=4, spread=0.2, steps=20) != first
    assert simulate_step(work, seed=3, spread=0.2, steps=5).seconds == first.seconds[:5]
    assert len(set(simulate_step(work, steps=3).seconds)) == 1


def test_a_step_waits_for_the_slowest_worker():
    """The median of the largest of n lognormal numbers is known."""
    done = simulate_step(make_work(CALM, Plan(data=1000), host_s=0.0), spread=0.1, steps=400)
    largest = NormalDist().inv_cdf(0.5 ** (1 / 1000))
    assert median(done.seconds) == pytest.approx(4 * 0.03 * math.exp(0.1 * largest), rel=0.01)


@pytest.mark.parametrize("plan", [Plan(data=64), Plan(data=8, pipeline=4), Plan(data=16, channel=4)])
@pytest.mark.parametrize("overlaps", [False, True])
def test_slower_links_and_more_stragglers_never_help(plan, overlaps):
    stage = replace(STAGE, send_bytes=1e6, inside_s=0.001)

    def seconds(gb_s=10.0, spread=0.0, **network):
        work = make_work(stage, plan, overlaps, make_cluster(gb_s=gb_s, **network))
        return simulate_step(work, spread=spread, steps=50).mean_s

    links = [seconds(gb_s) for gb_s in (100.0, 30.0, 10.0, 3.0, 1.0)]
    assert links == sorted(links) and links[0] < links[-1]
    stragglers = [seconds(spread=spread) for spread in (0.0, 0.05, 0.1, 0.2, 0.4)]
    assert stragglers == sorted(stragglers) and stragglers[0] < stragglers[-1]


@pytest.mark.parametrize(
    "plan", [Plan(data=10_000), Plan(data=1250, pipeline=8), Plan(data=100, pipeline=100)]
)
def test_ten_thousand_workers_take_seconds(plan):
    start = time.process_time()
    done = simulate_step(make_work(replace(STAGE, lanes=8), plan, overlaps=True), spread=0.1, steps=100)
    assert len(done.seconds) == 100 and time.process_time() - start < 5


def test_a_trace_has_every_event_in_a_row_without_overlaps():
    work = make_work(replace(STAGE, send_bytes=1e6, inside_s=0.001), Plan(data=2, pipeline=2), overlaps=True)
    done = simulate_step(work)
    trace = json.loads(json.dumps(to_chrome(done.events)))
    spans = [row for row in trace["traceEvents"] if row["ph"] == "X"]
    assert len(spans) == len(done.events)
    assert {row["cat"] for row in spans} >= {"forward", "backward", "send", "exchange", "update", "host"}
    assert max(row["ts"] + row["dur"] for row in spans) == pytest.approx(1e6 * done.mean_s)
    for row in spans:
        beside = [
            one for one in spans if (one["pid"], one["tid"]) == (row["pid"], row["tid"]) and one is not row
        ]
        end = row["ts"] + row["dur"]
        assert all(one["ts"] >= end - 1e-6 or one["ts"] + one["dur"] <= row["ts"] + 1e-6 for one in beside)


@pytest.mark.parametrize("keys", [{"seed": -1}, {"spread": -0.1}, {"spread": math.nan}, {"steps": 0}])
def test_bad_steps_are_refused_in_a_line(keys):
    with pytest.raises(SpecError, match=f"{next(iter(keys))}="):
        simulate_step(make_work(), **keys)
