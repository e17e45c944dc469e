"""A Launch refuses what cannot be started."""

import sys

import pytest

import lockstep
from lockstep.cli.main import run
from lockstep.errors import SpecError
from lockstep.spec import Launch


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
