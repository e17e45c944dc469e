"""A plan is read from a text or a file, checked, and written as it is read."""

import pytest

from lockstep import Launch
from lockstep.errors import SpecError
from lockstep.spec.plan import Plan, read_plan


@pytest.mark.parametrize(
    "text",
    ["pipeline=2", "data=2,pipeline=3", "data=4", "pipeline=3,schedule=gpipe,cost=counted,cuts=a.b/c"],
)
def test_a_plan_is_written_as_it_is_read(text):
    assert str(read_plan(text)) == text
    assert Launch(plan=text).plan == read_plan(text)


def test_a_file_holds_the_same_keys(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text('data = 2\npipeline = 3\ncuts = ["a", "b"]\n')
    assert read_plan(str(path)) == Plan(2, 3, cuts=("a", "b"))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("pipeline", "must be KEY=VALUE"),
        ("pipeline=2,pipeline=3", "stands twice"),
        ("pipelin=2", "did you mean 'pipeline'"),
        ("pipeline=0", "plan.pipeline=0 must be"),
        ("data=0", "data=0 must be"),
        ("pipeline=two", "must be a whole number"),
        ("schedule=best", "unknown schedule 'best'"),
        ("cost=guessed", "unknown cost 'guessed'"),
        ("pipeline=3,cuts=a", "names 1 cuts, and pipeline=3 has 2"),
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
    ):
        with pytest.raises(SpecError, match=told):
            plan.for_workers(workers)
