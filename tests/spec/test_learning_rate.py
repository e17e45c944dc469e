"""The learning rate over a run: ends, warm-up, direction, peak."""

import itertools
import math

import pytest

from lockstep.spec import Schedule
from lockstep.spec.rule.update_rule import SCHEDULES

BASE, EPOCHS, STEPS = 0.4, 10, 50  # steps an epoch
TOTAL = EPOCHS * STEPS


def curve(schedule: Schedule, total: int = TOTAL, steps: int = STEPS) -> list[float]:
    return [schedule.rate(BASE, step, total, steps) for step in range(total)]


@pytest.mark.parametrize("name", ["constant", "step", "cosine", "linear"])
def test_without_warmup_the_first_step_has_the_base_rate(name: str) -> None:
    assert curve(Schedule(name))[0] == BASE


@pytest.mark.parametrize("name", ["constant", "step", "cosine", "linear"])
def test_warmup_is_linear_and_ends_at_the_base_rate(name: str) -> None:
    rates = curve(Schedule(name, warmup_epochs=1.5))
    assert rates[:75] == [BASE * (step + 1) / 75 for step in range(75)]
    assert rates[75] == BASE


@pytest.mark.parametrize("name", ["constant", "step", "cosine", "linear"])
def test_after_warmup_the_rate_never_rises(name: str) -> None:
    rates = curve(Schedule(name, warmup_epochs=2))[100:]
    assert all(a >= b for a, b in itertools.pairwise(rates))


@pytest.mark.parametrize("name", SCHEDULES)
def test_rates_stay_between_zero_and_the_base(name: str) -> None:
    assert all(0.0 < rate <= BASE for rate in curve(Schedule(name)))


@pytest.mark.parametrize(("name", "bound"), [("cosine", 1e-4), ("linear", 0.003)])
def test_a_curve_ends_near_its_final_share(name: str, bound: float) -> None:
    assert 0 <= curve(Schedule(name))[-1] / BASE < bound
    last = curve(Schedule(name, options={"final": 0.25}))[-1] / BASE
    assert 0.25 <= last < 0.25 + bound


def test_cosine_is_half_way_in_the_middle() -> None:
    rates = curve(Schedule("cosine"))
    assert math.isclose(rates[TOTAL // 2], BASE / 2)
    assert math.isclose(rates[TOTAL // 4], BASE * (1 + math.cos(math.pi / 4)) / 2)


def test_step_falls_by_gamma_every_so_many_epochs() -> None:
    rates = curve(Schedule("step", options={"every_epochs": 3, "gamma": 0.5}))
    assert [rates[epoch * STEPS] / BASE for epoch in range(10)] == [
        1,
        1,
        1,
        0.5,
        0.5,
        0.5,
        0.25,
        0.25,
        0.25,
        0.125,
    ]
    assert rates[3 * STEPS - 1] == BASE


def test_onecycle_rises_to_the_base_at_its_peak_and_falls() -> None:
    rates = curve(Schedule("onecycle", options={"peak": 0.4, "start": 0.1, "final": 0.01}))
    top = rates.index(max(rates))
    assert top == 200
    assert rates[top] == BASE
    assert math.isclose(rates[0], 0.1 * BASE)
    assert rates[:top] == sorted(rates[:top])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert 0.01 <= rates[-1] / BASE < 0.02


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "onecycle"])
def test_a_warmup_over_the_whole_run_is_all_there_is(name: str) -> None:
    rates = curve(Schedule(name, warmup_epochs=2), total=2 * STEPS)
    assert rates == [BASE * (step + 1) / 100 for step in range(100)]


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_run_of_one_step_has_a_rate(name: str) -> None:
    assert 0 < curve(Schedule(name), total=1, steps=1)[0] <= BASE


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_rate_depends_on_the_step_alone(name: str) -> None:
    schedule = Schedule(name, warmup_epochs=float(name != "onecycle"))
    backwards = [schedule.rate(BASE, step, TOTAL, STEPS) for step in reversed(range(TOTAL))]
    assert curve(schedule) == backwards[::-1]
