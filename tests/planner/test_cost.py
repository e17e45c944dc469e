"""The closed form, by numbers that one can add up by hand."""

import time
from dataclasses import replace

import pytest
from layer_chain import LAYER_S, chain, cluster, network, run_of
from patience import PATIENCE_S

from lockstep.errors import SpecError
from lockstep.planner.cost import predict
from lockstep.planner.deal_work import cut_stages, deal_work
from lockstep.planner.exchange_time import Ring, gather_s, reduce_s, send_s
from lockstep.planner.explain import advise, explain, find_limit, find_turn
from lockstep.planner.memory import worker_memory
from lockstep.planner.search import best_of_counts, find_changed, find_plans, list_plans
from lockstep.planner.simulation.step_events import simulate_step
from lockstep.spec import Model
from lockstep.spec.cluster import ExchangeTimes, NetworkRate
from lockstep.spec.plan import Plan, read_plan
from lockstep.train.foresight.own_prediction import count_profile

LANE_S = 8 * 3 * LAYER_S
GRADIENTS = 4 * 8_000_000


def cost_of(plan, run=None, profile=None, where=None):
    plan = read_plan(plan) if isinstance(plan, str) else plan
    plan = plan if plan.data else plan.for_workers(plan.least)
    return predict(deal_work(run or run_of(), profile or chain(), where or cluster(), plan))


def test_one_worker_takes_what_was_measured():
    found = cost_of("data=1", profile=chain(fixed_s=0.04))
    assert found.total_s == pytest.approx(8 * LANE_S + 0.04)
    assert found.update_s == pytest.approx(0.02) and found.host_s == pytest.approx(0.02)
    assert found.exposed_s == found.bubble_s == found.inside_s == 0


def test_steps_of_a_round_share_its_exchange_and_update():
    run, plan = run_of(), read_plan("data=4")
    alone, local = run, replace(run, train=replace(run.train, local_steps=4))
    one, four = (cost_of(plan, each, chain(fixed_s=0.04)) for each in (alone, local))
    assert four.exposed_s == pytest.approx(one.exposed_s / 4)
    assert four.update_s == pytest.approx(one.update_s / 4)
    walked = 2 * chain().parameters * (3 * 32 + 16) / 4 / (cluster().worker.memory_gb_s * 1e9)
    assert four.compute_s == pytest.approx(one.compute_s + walked)
    kept, more = (worker_memory(each, chain(), plan, True) for each in (alone, local))
    assert more.gradients_gb > kept.gradients_gb and more.weights_gb == kept.weights_gb


@pytest.mark.parametrize(("workers", "lanes"), [(2, 4), (3, 3), (4, 2), (8, 1)])
def test_data_deals_lanes_and_exchanges_gradients(workers, lanes):
    """Each sends (W − 1)/W of the gradients, twice; on a CPU nothing is beside it."""
    found = cost_of(f"data={workers}")
    sent_s = 2 * GRADIENTS * (workers - 1) / workers / 1e9
    assert found.compute_s == pytest.approx(lanes * LANE_S)
    assert found.exposed_s == pytest.approx(sent_s)
    assert found.total_s == pytest.approx(lanes * LANE_S + sent_s)


def test_gpu_hides_what_is_ready_early():
    """All buckets but the last travel during the last lane's backward pass."""
    found = cost_of("data=2", where=cluster(kind="gpu"))
    whole = 2 * GRADIENTS / 2 / 1e9
    assert 0 < found.exposed_s < whole
    assert found.exposed_s + found.hidden_s == pytest.approx(whole)


def test_slowdown_of_busy_neighbours():
    found = cost_of("data=2", where=cluster(slowdown=(1.0, 1.25)))
    assert found.compute_s == pytest.approx(4 * LANE_S * 1.25)


@pytest.mark.parametrize("stages", [2, 4])
def test_bubble(stages):
    """(P − 1) lanes of a stage, as of the formula for equal stages."""
    found = cost_of(f"pipeline={stages}", where=cluster(gb_s=1e6))
    stage_s = LANE_S / stages
    assert found.bubble_s == pytest.approx((stages - 1) * stage_s, rel=1e-3)
    assert found.compute_s == pytest.approx(8 * stage_s)


def test_lanes_of_another_size_keep_the_fixed_part():
    """With half the images a lane takes what its layers take; what a step costs besides stays."""
    profile = chain(fixed_s=0.4)
    own, half = (cost_of("data=1", run=run_of(images=images), profile=profile) for images in (4, 2))
    assert half.host_s + half.update_s == pytest.approx(own.host_s + own.update_s) == pytest.approx(0.4)
    assert half.compute_s == pytest.approx(own.compute_s / 2)


def test_stages_on_two_nodes_send_over_the_network():
    """With two workers a node stage 1 sends to stage 2 over the network, the others within a node."""
    where = replace(cluster(), node=replace(cluster().node, workers=2), network=NetworkRate(7.0, 0.5))
    within, between = (send_s(where, 1, 1e6, stage) for stage in (0, 1))
    assert within == send_s(where, 1, 1e6, 2) == pytest.approx(1e6 / 1e9)
    assert between == pytest.approx(7e-6 + 1e6 / 0.5e9)
    slow = replace(where, network=NetworkRate(7.0, 1e-4))
    fast_s, slow_s = (cost_of("pipeline=4", where=each).total_s for each in (where, slow))
    work = deal_work(run_of(), chain(), slow, replace(read_plan("pipeline=4"), data=1))
    assert fast_s < 0.5 * slow_s == pytest.approx(0.5 * simulate_step(work).mean_s, rel=0.12)


def test_layers_by_channel_are_those_that_the_plan_names():
    """As when they are split: `fc` is no layer fc7, and the first pattern decides."""
    layers = tuple(
        replace(layer, name=name, kind="fully connected")
        for layer, name in zip(chain().layers, ("a.fc", "a.fc7", "b.fc", "fc (2)"), strict=False)
    )
    profile, run = replace(chain(), layers=layers), run_of(slices=2)
    for patterns, split in ((("fc",), 3), (("a",), 2), (("fc7:data", "*"), 3), (("b.*",), 1)):
        whole, mixed = (
            deal_work(run, profile, cluster(), Plan(data=2, layers=some)) for some in ((), patterns)
        )
        sent = [sum(bucket.num_bytes for bucket in one.stages[0].buckets) for one in (whole, mixed)]
        assert sent[1] == pytest.approx(sent[0] * (4 - split) / 4)


def test_shard_sends_as_much_and_updates_less():
    plain, sharded = (
        cost_of(plan, profile=chain(fixed_s=0.4)) for plan in ("data=4", "data=4,shard=optimizer")
    )
    assert sharded.exposed_s + sharded.gather_s == pytest.approx(plain.exposed_s)
    assert sharded.update_s == pytest.approx(plain.update_s / 4)


def test_channel_and_spatial_divide_computing_and_exchange_inside():
    run = run_of(bands=2, slices=2)
    for plan in ("channel=2", "spatial=2"):
        found = cost_of(plan, run)
        assert found.compute_s == pytest.approx(8 * LANE_S / 2)
        assert found.inside_s > 0 and found.exposed_s == 0


def test_over_nodes_the_network_decides():
    where = cluster(workers=4, gb_s=100.0, network=network(gb_s=0.25))
    found = cost_of("data=8", where=where)
    inside = GRADIENTS * 3 / 8 / 100e9
    between = 4 * GRADIENTS / 2 / 0.25e9  # each worker of a node sends half of them to the other node
    assert found.exchange_s == pytest.approx(2 * (inside + between))
    assert 0 < found.exposed_s < found.exchange_s  # the network carries while a core computes
    with pytest.raises(SpecError, match=r"8 workers are 2 nodes of 4.*\[network\]"):
        cost_of("data=8", where=cluster(workers=4))


def test_measured_exchanges_count_before_links():
    where = cluster()
    table = ExchangeTimes("reduce", 2, (1.0, 10.0), (2.0, 11.0))
    where = type(where)(where.name, where.worker, where.node, exchange=(table,))
    assert reduce_s(where, Ring(2), 5.5e6) == pytest.approx(6.5e-3)
    assert reduce_s(where, Ring(2), 20e6) == pytest.approx(22e-3)
    assert reduce_s(where, Ring(2), 10.0) == pytest.approx(2e-3)
    assert gather_s(where, Ring(4), 8e6) == pytest.approx(6e-3)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_stages_are_balanced(count):
    costs = [5.0, 1.0, 1.0, 7.0, 2.0, 2.0, 2.0, 4.0]
    stages = cut_stages(costs, count)
    assert [i for own in stages for i in own] == list(range(8)) and len(stages) == count

    def best(start, parts):
        if parts == 1:
            return sum(costs[start:])
        ends = range(start + 1, len(costs) - parts + 2)
        return min(max(sum(costs[start:end]), best(end, parts - 1)) for end in ends)

    assert max(sum(costs[i] for i in own) for own in stages) <= best(0, count) * 1.002


def test_memory_of_shares_and_stages():
    run, profile = run_of(optimizer="adam"), chain()
    plain, shared, staged = (
        worker_memory(run, profile, read_plan(plan), False)
        for plan in ("data=4", "data=4,shard=parameters", "data=1,pipeline=4")
    )
    assert shared.weights_gb == plain.weights_gb / 4 and shared.optimizer_gb == plain.optimizer_gb / 4
    assert plain.optimizer_gb == 2 * plain.weights_gb
    assert staged.weights_gb == plain.weights_gb / 4


def test_what_is_frozen_has_no_gradients_and_keeps_nothing():
    run = replace(run_of(optimizer="adam"), model=Model("resnet18"))
    frozen = replace(run, model=replace(run.model, freeze=("*stem*", "*layer1*", "*layer2*", "*layer3*")))
    whole, part = (count_profile(each, (3, 64, 64), 10, 1000) for each in (run, frozen))
    every, some = (worker_memory(run, each, read_plan("data=1"), False) for each in (whole, part))
    trained = 4e-9 * sum(each.values for each in part.weights)
    assert some.weights_gb == every.weights_gb and some.optimizer_gb == pytest.approx(2 * trained)
    assert 0.5 * every.gradients_gb < some.gradients_gb < 0.8 * every.gradients_gb
    assert 0 < some.activations_gb < 0.2 * every.activations_gb


def test_plans_are_ranked_and_repeat():
    run, profile, where = run_of(bands=2, slices=2), chain(), cluster()
    found = find_plans(run, profile, where, 4)
    times = [one.cost.total_s for one in found]
    assert times == sorted(times) and len({str(one.plan) for one in found}) == len(found)
    assert {one.workers for one in found} == {4}
    assert [str(one.plan) for one in found] == [str(one.plan) for one in find_plans(run, profile, where, 4)]
    least = find_plans(run, profile, where, 4, "memory")[0]
    assert least.memory.total_gb == min(one.memory.total_gb for one in found)


def test_only_what_the_run_allows():
    plans = {str(plan) for plan in list_plans(run_of(), 4)}
    assert "data=4" in plans and not any("spatial" in plan for plan in plans)
    assert any("spatial=2" in str(plan) for plan in list_plans(run_of(bands=2), 4))
    with pytest.raises(SpecError, match=r"for 1009 workers: .*\(train.lanes=8\).* -o train.lanes=1024"):
        find_plans(run_of(), chain(), cluster(network=network()), 1009)


def test_kernels_allow_fewer_plans():
    """Those that `auto` takes there; in fp16 they compute no parts of a model, and none has a grid."""
    measured = replace(chain(), kernels="compiled")
    elsewhere = replace(chain(device="another"), kernels="auto")
    for profile, where in ((measured, cluster()), (elsewhere, cluster(kind="gpu"))):
        for precision, are_left in (("fp16", False), ("bf16", True)):
            plans = find_plans(run_of(precision=precision), replace(profile, precision=precision), where, 4)
            assert are_left is any(one.plan.pipeline > 1 or one.plan.shard == "parameters" for one in plans)
        with pytest.raises(SpecError, match=r"compiled kernels have no such grid: use kernels.set=stock"):
            find_plans(run_of(bands=2), profile, where, 4)
        assert not any(one.change for one in find_changed(run_of(), profile, where, 4, "time", ["grid"]))
        best = find_plans(run_of(), profile, where, 4)[0]
        assert not any("by channel" in one.what for one in advise(best, profile, where))
    by_gpu = replace(measured, device="a GPU")
    assert any(one.plan.spatial > 1 for one in find_plans(run_of(bands=2), by_gpu, cluster(), 4))


def test_what_does_not_fit_comes_last():
    small = cluster(memory_gb=0.1)
    found = find_plans(run_of(optimizer="adam"), chain(), small, 4)
    assert found[0].fits and not found[-1].fits


def test_words():
    slow, fast = (cluster(workers=8, gb_s=rate) for rate in (0.01, 1000.0))
    run, profile = run_of(), chain()
    assert find_turn(run, profile, slow) == 1 and find_turn(run, profile, fast) is None
    best = find_plans(run, profile, slow, 8)[0]
    told = "\n".join(explain(best, profile, slow))
    assert "communication-bound beyond 1 worker with" in told and "32 MB of gradients" in told
    some = cluster(workers=8, gb_s=0.3)
    assert "bf16 on the wire" in "\n".join(explain(find_plans(run, profile, some, 8)[0], profile, some))
    assert find_limit(run, profile, fast)[0] == pytest.approx(8, rel=0.01)


def test_a_thousand_workers_within_seconds():
    where = cluster(kind="gpu", gb_s=200.0, network=network(gb_s=200.0))
    profile = chain(layers=160, lanes=1024)
    start = time.perf_counter()
    found = best_of_counts(run_of(lanes=1024), profile, where, "time")
    assert found[-1].workers == 1024
    assert time.perf_counter() - start < PATIENCE_S


def test_layers_by_channel_send_less_where_weights_are_many():
    profile = chain(parameters=0)
    rows = list(profile.layers)
    rows[-1] = type(rows[0])("fc", "fully connected", 1e7, 50_000_000, 1000, 1000, times=rows[0].times)
    profile = type(profile)(**{**vars(profile), "layers": tuple(rows)})
    run = run_of(slices=4)
    plain, mixed = (cost_of(plan, run, profile) for plan in (Plan(data=4), Plan(data=4, layers=("*",))))
    assert mixed.total_s < plain.total_s and mixed.exposed_s == 0
