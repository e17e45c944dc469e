"""A Launch refuses what cannot be started."""

import sys

import pytest

import lockstep
from lockstep.cli.main import run
from lockstep.errors import SpecError
from lockstep.spec import Kernels, Launch, Run, Train


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_another_system_is_one_line(system: str, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "platform", system)
    assert run(["train"]) == 2
    assert capsys.readouterr().err.startswith(
        f"lockstep: Lockstep runs on Linux only, and this is {system}: "
    )
    with pytest.raises(SpecError, match="runs on Linux only"):
        lockstep.train(lockstep.Run())


def test_an_unknown_device_names_the_nearest() -> None:
    with pytest.raises(SpecError, match="--device: unknown device 'cdua': did you mean 'cuda'"):
        Launch(device="cdua")


def test_resume_and_fork_exclude_each_other() -> None:
    assert Launch(resume="auto").resume == "auto"
    assert Launch(fork="a").fork == "a"
    with pytest.raises(SpecError, match="--resume auto and --fork a exclude each other"):
        Launch(resume="auto", fork="a")


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/", "a\\b", "a\0b"])
def test_a_name_that_is_no_folder_is_refused(name: str) -> None:
    with pytest.raises(SpecError, match="must be the name of a folder"):
        Launch(name=name)


@pytest.mark.parametrize("name", ["a", "a.b", ".a", "run 1", "läuft"])
def test_a_name_of_a_folder_is_taken(name: str) -> None:
    assert Launch(name=name).name == name


@pytest.mark.parametrize(
    ("plan", "run", "told"),
    [
        (
            "spatial=4",
            Run(train=Train(bands=2)),
            "--plan spatial=4: rows over 4 workers need sums over pixels in a grid of as many bands: set "
            "train.bands=4, which is part of the identity",
        ),
        ("spatial=3", Run(), "set train.bands=4"),
        ("channel=2", Run(train=Train(sync_norm=True)), "use train.sync_norm=false, which is another run"),
        (
            "spatial=2",
            Run(kernels=Kernels("fused")),
            "fused kernels sum over all pixels at once, and spatial needs a sum for each band: use channel "
            "instead, or kernels.set=stock, which is another run",
        ),
        (
            "spatial=2,channel=2",
            Run(kernels=Kernels("compiled")),
            "compiled kernels sum over all pixels",
        ),
        ("data=16,channel=2", Run(), "32 workers are more than train.lanes=8 × channel=2"),
    ],
)
def test_layers_over_workers_must_go_with_the_run(plan: str, run: Run, told: str) -> None:
    launches = [Launch(plan=plan)]
    if "lanes" not in told:
        launches.append(Launch(plan="data=8,pipeline=4", fallbacks=(plan,)))
    for launch in launches:
        with pytest.raises(SpecError) as error:
            launch.check_run(run)
        found = str(error.value).replace("--or ", "--plan ")
        assert told in found and "\n" not in found
    Launch(plan="pipeline=2").check_run(run)


def test_layers_over_workers_that_go_with_the_run() -> None:
    for plan, given in (
        ("spatial=3", Run(train=Train(bands=4))),
        ("data=8,channel=4", Run(train=Train(wire="bf16"))),
        ("data=2,pipeline=2,channel=2", Run(kernels=Kernels("fused"))),
        ("channel=3", Run(kernels=Kernels("compiled"))),
        ("data=2,pipeline=2,spatial=2,channel=2,shard=optimizer", Run(train=Train(bands=2))),
    ):
        Launch(plan=plan).check_run(given)


@pytest.mark.parametrize("options", [{"audit": 3}, {"trace": True}, {"backend": "mpi"}])
def test_what_needs_whole_layers_is_refused(options: dict) -> None:
    with pytest.raises(SpecError, match=r"channel=2 (splits|needs) them: leave --"):
        Launch(plan="channel=2", **options).check_run(Run())


def test_numbers_of_workers_under_plans() -> None:
    assert Launch(plan="spatial=2,channel=2").num_workers == 4 and Launch(plan="channel=2").is_bound
    opened = Launch(plan="channel=2")
    assert not opened.splits_state(Run())
    assert opened.sizes(8, 4) == (8, 6, 4, 2)
    assert str(opened.plan_for(6, 4)) == "data=3,channel=2"
    several = Launch(plan="data=2,pipeline=2,channel=2", fallbacks=("spatial=2", "data=1"))
    assert several.sizes(8, 8) == (8, 6, 4, 2, 1)
    assert str(several.plan_for(8, 8)) == "data=2,pipeline=2,channel=2"
    assert str(several.plan_for(4, 8)) == "data=2,spatial=2"


def test_a_plan_to_fall_back_to_gives_each_worker_a_lane() -> None:
    launch = Launch(plan="data=2,channel=4", fallbacks=("channel=2", "data=1"))
    assert launch.sizes(8, 2) == (8, 4, 2, 1), "with 6 there would be 3 along data for 2 lanes"
