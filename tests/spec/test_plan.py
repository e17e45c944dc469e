"""A plan is read from a text or a file, checked, and written as it is read."""

import re
from dataclasses import replace

import pytest

from lockstep import Data, Launch, Run, Train
from lockstep.errors import SpecError
from lockstep.spec.plan import Plan, read_plan
from lockstep.spec.plan_check import check_plans

PARTS = ("pipeline=2", "channel=2", "shard=parameters", "layers=head")  # of a model, at a worker


@pytest.mark.parametrize(
    "text",
    [
        "pipeline=2",
        "data=2,pipeline=3",
        "data=4",
        "channel=2",
        "data=2,pipeline=2,spatial=4,channel=8,replicas=2,shard=optimizer",
        "pipeline=3,schedule=gpipe,cost=counted,cuts=a.b/c",
        "data=4,layers=classifier:data/hidden*",
    ],
)
def test_a_plan_is_written_as_it_is_read(text):
    assert str(read_plan(text)) == text
    assert Launch(plan=text).plan == read_plan(text)


def test_a_file_holds_the_same_keys(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text('data = 2\npipeline = 3\nspatial = 4\nchannel = 5\ncuts = ["a", "b"]\n')
    assert read_plan(str(path)) == Plan(2, 3, spatial=4, channel=5, cuts=("a", "b"))
    path.write_text('data = 4\n[layers]\nhead = "data"\n"hidden*" = "channel"\n')
    assert read_plan(str(path)) == read_plan("data=4,layers=head:data/hidden*")
    path.write_text('[layers]\nhead = "rows"\n')
    with pytest.raises(SpecError, match=r"layers\.head: unknown way 'rows': choose from channel, data"):
        read_plan(str(path))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("pipeline", "must be KEY=VALUE"),
        ("pipeline=2,pipeline=3", "stands twice"),
        ("pipelin=2", "did you mean 'pipeline'"),
        ("pipeline=0", "plan.pipeline=0 must be"),
        ("data=0", "data=0 must be"),
        ("channel=0", "plan.channel=0 must be"),
        ("spatial=-1", "must be a whole number"),
        ("spatal=2", "did you mean 'spatial'"),
        ("pipeline=two", "must be a whole number"),
        ("schedule=best", "unknown schedule 'best'"),
        ("cost=guessed", "unknown cost 'guessed'"),
        ("pipeline=3,cuts=a", "names 1 cuts, and pipeline=3 has 2"),
        ("layers=a,pipeline=2,shard=optimizer", "goes with data alone, not with pipeline and shard"),
    ],
)
def test_a_wrong_plan_is_refused(text, told):
    with pytest.raises(SpecError, match=told):
        read_plan(text)


def test_the_equation():
    assert Plan(pipeline=2).for_workers(6).data == 3 and Plan(2, 2).workers == 4
    for plan, workers, told in (
        (Plan(pipeline=2), 5, r"data × 2, and the number of workers is 5: start 4 or 6"),
        (Plan(pipeline=4), 3, "start 4$"),
        (Plan(3, 2), 4, "3 × 2 = 6, and the number of workers is 4: start 6"),
        (Plan(3), 4, "= data × pipeline = 3 × 1 = 3, and the number of workers is 4: start 3"),
        (Plan(channel=4), 6, "= data × channel = data × 4, and the number of workers is 6: start 4 or 8"),
        (
            Plan(2, 2, 3, 4),
            8,
            "= data × pipeline × spatial × channel = 2 × 2 × 3 × 4 = 48, and the number of workers is 8: "
            "start 48, or leave `data` out of the plan",
        ),
        (Plan(spatial=2, channel=2, shard="optimizer"), 4, "give 8 workers, or leave shard out"),
    ):
        with pytest.raises(SpecError, match=told):
            plan.for_workers(workers)


def test_numbers_of_workers_that_come_out():
    plan = Plan(pipeline=2, spatial=2, channel=2)
    assert plan.workers is None and plan.least == 8 and plan.for_workers(24).data == 3
    assert [plan.most(workers) for workers in (7, 8, 15, 16, 17)] == [0, 8, 8, 16, 16]
    assert [Plan(2, spatial=3).most(workers) for workers in (5, 6, 12)] == [0, 6, 6]
    assert Plan(2, 2, 3, 4).workers == 48


def test_what_a_plan_splits():
    for text, layers, state in (
        ("data=4", False, False),
        ("channel=2", True, False),
        ("spatial=2", True, False),
        ("pipeline=2", False, True),
        ("pipeline=2,channel=2", True, True),
        ("shard=optimizer", False, True),
    ):
        plan = read_plan(text)
        assert (plan.splits_layers, plan.splits_state, plan.splits) == (layers, state, layers or state), text


@pytest.mark.parametrize(
    ("run", "plans", "told"),
    [
        (Run(train=Train(recompute=True)), PARTS, "train.recompute=true, as a block that is computed again"),
        (Run(data=Data("folder", options={"sizes": "8@0"})), PARTS[:-1], "data.sizes, as the parts"),
        (Run(train=Train(growth="512@1", slices=2)), ("layers=head",), "train.batch=256@0,512@1, as each"),
    ],
)
def test_a_plan_that_does_not_go_with_the_run_is_refused_beforehand(run, plans, told):
    """Also one for when workers are lost: not only then."""
    for text in plans:
        plan = replace(read_plan(text), data=2)
        for flag, given in (("--plan", [plan]), ("--or", [Plan(data=3), plan])):
            with pytest.raises(SpecError, match=f"{flag} {re.escape(str(plan))}: not with {told}"):
                check_plans(given, run, 4)
    check_plans([Plan(data=2, shard="gradients")], run, 2)
