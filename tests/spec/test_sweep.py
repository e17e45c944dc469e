"""What is swept: lists, ranges, combinations and their names, what extends a sweep, and halving."""

from dataclasses import replace

import pytest

from lockstep.errors import SpecError
from lockstep.spec.search.halving import keep_best, rung_epochs
from lockstep.spec.search.sweep import Sweep
from lockstep.spec.search.value_list import read_range, split_values

GRID = Sweep("shapes", choices={"train.batch": (32, 64), "optimizer.lr": (0.1, 1e-05)})
DRAWN = Sweep(
    ranges={"optimizer.lr": (0.01, 1.0)}, choices={"train.batch": (32, 64)}, search="random", samples=8
)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("0.1", ["0.1"]),
        ("0.1, 0.2", ["0.1", "0.2"]),
        ('["flip","crop"],["flip"]', ['["flip","crop"]', '["flip"]']),
        ('"128@0,160@6","128@0"', ['"128@0,160@6"', '"128@0"']),
        ("[1,[2,3]],4", ["[1,[2,3]]", "4"]),
        ("", [""]),
    ],
)
def test_commas_split_outside_brackets_and_quotes(text, values):
    assert split_values("key", text) == values


@pytest.mark.parametrize(
    ("text", "says"), [("1,,2", "nothing between"), ("[1,2", "] is missing"), ('"a', '" is')]
)
def test_texts_that_do_not_split(text, says):
    with pytest.raises(SpecError, match=says):
        split_values("key", text)


def test_ranges():
    assert read_range("key", "0.01..1") == (0.01, 1.0)
    assert read_range("key", "1e-4..1e-2") == (1e-4, 1e-2)
    assert [type(end) for end in read_range("key", "1..64")] == [int, int]
    assert read_range("data.dir", "../photos") is None and read_range("data.dir", "a..b") is None
    for text in ("1..0.1", "0..1", "-1..1"):
        with pytest.raises(SpecError, match="must rise from above 0"):
            read_range("key", text)


def test_the_grid_has_every_combination_by_name():
    assert [GRID.name(point) for point in GRID.points()] == [
        "batch=32,lr=0.1", "batch=32,lr=1e-05", "batch=64,lr=0.1", "batch=64,lr=1e-05",
    ]  # fmt: skip
    assert GRID.name(GRID.points()[0], 3) == "batch=32,lr=0.1,seed=3"


def test_names_are_folders_and_differ():
    sweep = Sweep(
        choices={
            "model.name": ("a", "b"),
            "data.name": ("x/y", "x_y"),
            "data.augment": (["flip", "crop"], []),
        }
    )
    names = [sweep.name(point) for point in sweep.points()]
    assert names[0].startswith("model.name=a,data.name=x_y,augment=flip+crop~")
    assert len(set(names)) == len(names) and not any("/" in name for name in names)
    long = Sweep(choices={"data.dir": ("a" * 300, "a" * 301)})
    assert len({long.name(point) for point in long.points()}) == 2
    assert all(len(long.name(point)) < 200 for point in long.points())


def test_draws_depend_on_the_seed_alone_and_more_hold_fewer():
    points = DRAWN.points()
    assert points == DRAWN.points() and len({DRAWN.name(point) for point in points}) == 8
    assert replace(DRAWN, samples=20).points()[:8] == points
    assert replace(DRAWN, seed=1).points() != points
    assert all(0.01 <= point["optimizer.lr"] <= 1 and point["train.batch"] in (32, 64) for point in points)
    assert (
        min(point["optimizer.lr"] for point in points) < 0.1 < max(point["optimizer.lr"] for point in points)
    )
    with pytest.raises(SpecError, match="only 4 combinations"):
        replace(GRID, search="random", samples=5).points()


@pytest.mark.parametrize("sweep", [GRID, DRAWN, replace(GRID, seeds=(0, 2), overrides=("train.epochs=1",))])
def test_a_sweep_is_read_as_it_was_written(sweep):
    assert Sweep.from_json(sweep.to_json()) == sweep


def test_more_values_extend_a_sweep():
    more = replace(GRID, choices={"train.batch": (16, 64, 32), "optimizer.lr": (0.1, 1e-05)})
    more.check_extends(GRID, "x")
    replace(DRAWN, samples=9).check_extends(DRAWN, "x")
    replace(GRID, seeds=(0, 1)).check_extends(replace(GRID, seeds=(1,)), "x")


@pytest.mark.parametrize(
    ("earlier", "now", "says"),
    [
        (
            GRID,
            {"choices": {"train.batch": (32, 64), "optimizer.lr": (0.1,)}},
            "lr=0.1,1e-05, and this command has",
        ),
        (GRID, {"choices": {"train.batch": (32, 64)}}, "this command has no optimizer.lr"),
        (GRID, {"recipe": "mnist"}, "begun with RECIPE=shapes, and this command has RECIPE=mnist"),
        (GRID, {"overrides": ("train.epochs=1",)}, "begun with no -o train.epochs, and this"),
        (GRID, {"seeds": (0,)}, "begun with no --seeds"),
        (GRID, {"search": "halving", "rungs": 2, "keep": 0.5}, "--search=grid"),
        (DRAWN, {"samples": 7}, "--samples=8"),
        (DRAWN, {"choices": {"train.batch": (32, 64, 128)}}, "train.batch=32,64, and"),
        (DRAWN, {"ranges": {"optimizer.lr": (0.01, 2.0)}}, "optimizer.lr=0.01..1, and"),
    ],
)
def test_another_sweep_is_refused(earlier, now, says):
    with pytest.raises(SpecError, match=says):
        replace(earlier, **now).check_extends(earlier, "runs/x")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({}, "nothing to sweep"),
        ({"choices": {"optimizer.lr": (0.1, 0.1)}}, "0.1 is there twice"),
        ({"ranges": {"optimizer.lr": (0.1, 1.0)}}, "give --search random"),
        ({"seeds": (1, 1)}, "must be different"),
        ({"seeds": (1,), "choices": {"seed": (1, 2)}}, "say the same"),
    ],
)
def test_what_is_no_sweep(fields, says):
    with pytest.raises(SpecError, match=says):
        Sweep(**fields)


def test_halving():
    assert rung_epochs(20, 3, 0.5) == [5, 10, 20] and rung_epochs(9, 3, 1 / 3) == [1, 3, 9]
    with pytest.raises(SpecError, match="too short for --rungs 3"):
        rung_epochs(2, 3, 0.5)
    scores = {"a": 0.1, "b": 0.3, "c": 0.3, "d": None, "e": 0.2}
    assert keep_best(scores, 0.5, {}) == ["b", "c", "e"] and keep_best(scores, 0.2, {}) == ["b"]
    assert keep_best({"a": 0.1, "b": 0.1, "c": 0.1}, 0.5, {"a": 2.3, "b": 2.29, "c": 2.2}) == ["b", "c"]
    assert keep_best({"a": None}, 0.5, {}) == []
    assert keep_best({"a": float("nan"), "b": 0.0}, 0.9, {}) == ["b"]
