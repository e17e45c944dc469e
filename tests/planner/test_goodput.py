"""Long runs whose nodes fail: deterministic, and what closed forms say where these apply."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.errors import SpecError
from lockstep.planner.simulation.failures import (
    DETECT_S,
    RECOVER_S,
    RESTART_S,
    FailingRun,
    expect_goodput,
    find_interval,
    simulate_run,
)

RECORD = Path(__file__).parents[2] / "benchmarks/results/recovery-cpu.json"
LONG = FailingRun(step_s=0.25, nodes=1000, node_mtbf_hours=20_000, restart_s=120, days=3000)


def test_restarts_are_as_the_closed_form_says():
    intervals = [300, 1200, 3600, 14400]
    for row in simulate_run(LONG, intervals, runs=3):
        lost, expected = 1 - row.restart, 1 - expect_goodput(LONG, row.interval_s)
        assert lost == pytest.approx(expected, rel=0.04)


def test_the_best_interval_is_that_of_young_and_daly():
    best = find_interval(LONG, runs=3)
    assert LONG.young_s == pytest.approx(math.sqrt(2 * 30 * 72_000))
    assert LONG.young_s / 1.5 < best.interval_s < 1.5 * LONG.young_s
    at_young = simulate_run(LONG, [LONG.young_s], runs=3)[0].restart
    assert best.restart == pytest.approx(at_young, abs=0.001)


def test_recovery_loses_a_step_and_its_own_time():
    run = replace(LONG, detect_s=5.0, recover_s=25.0, step_s=20.0)  # lanes: nobody gets more to do
    for row in simulate_run(run, [600, 3600], runs=3):
        saved = row.interval_s / (row.interval_s + 30)
        lost_s = 30 + 20 / 2 + 25  # also when the replaced node joins
        assert row.recovery / saved == pytest.approx(1 - lost_s / run.mtbf_s, abs=2e-4)
        assert row.recovery > row.restart


def test_a_lane_more_for_some_slows_all_until_the_node_is_replaced():
    few = replace(LONG, nodes=64, node_mtbf_hours=64 * 100, lanes=64, repair_s=36_000, days=1000)
    many = replace(few, lanes=1024)
    slow, quick = (simulate_run(run, [3600], runs=2)[0].recovery for run in (few, many))
    down = 36_000 / (36_000 + 100 * 3600)  # share of the time in which some node is down, roughly
    assert slow == pytest.approx((1 - down / 2) * 120 / 121, rel=0.02)
    assert quick == pytest.approx((1 - down / 17) * 120 / 121, rel=0.01)


def test_lost_state_means_the_last_checkpoint():
    none = replace(LONG, survive=0.0, detect_s=0.0, recover_s=0.0, repair_s=0.0)
    row = simulate_run(none, [1800], runs=1)[0]
    assert row.recovery == pytest.approx(row.restart, rel=0.01)


def test_runs_with_a_seed_are_repeated():
    rows = simulate_run(replace(LONG, days=30), [600, 3600], seed=7, runs=2)
    assert rows == simulate_run(replace(LONG, days=30), [600, 3600], seed=7, runs=2)
    assert rows != simulate_run(replace(LONG, days=30), [600, 3600], seed=8, runs=2)


def test_all_nodes_may_be_down():
    gone = replace(LONG, nodes=2, node_mtbf_hours=10, repair_s=360_000, days=100)
    row = simulate_run(gone, [600], runs=2)[0]
    assert 0 <= row.recovery < 0.2


def test_the_defaults_are_those_of_the_record():
    kill, freeze, restart = (row["value"] for row in json.loads(RECORD.read_text()))
    assert pytest.approx(kill, abs=0.01) == RECOVER_S
    assert pytest.approx(freeze, abs=0.01) == DETECT_S + RECOVER_S
    assert pytest.approx(restart, abs=0.1) == RESTART_S


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"step_s": -1.0}, "step_s=-1.0 must be above 0"),
        ({"node_mtbf_hours": 0.0}, "node_mtbf_hours=0.0 must be above 0"),
        ({"checkpoint_s": math.nan}, "checkpoint_s=nan must be a finite number"),
        ({"nodes": 1}, "give 2 or more"),
        ({"lanes": 512}, "lanes=512 for 1000 workers"),
        ({"survive": 1.5}, "from 0 to 1"),
    ],
)
def test_bad_runs_are_refused_in_a_line(keys, said):
    with pytest.raises(SpecError, match=said) as refused:
        replace(LONG, **keys)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("keys", [{"intervals_s": [0.0]}, {"runs": 0}, {"seed": -1}])
def test_bad_intervals_are_refused_in_a_line(keys):
    with pytest.raises(SpecError):
        simulate_run(LONG, **{"intervals_s": [60.0], **keys})
