"""A run's directory: names, the newest, one process at a time, and metrics that survive a crash."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from forked import call

from lockstep.errors import BadInput, LockstepError
from lockstep.runs.directory import RunDirectory
from lockstep.spec import Data, Run


def create(runs_dir: Path, name: str = "a") -> RunDirectory:
    directory = RunDirectory.create(runs_dir, name)
    directory.describe(Run(), {"seed": 0})
    return directory


def python(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    done = call([sys.executable, "-c", code, *map(str, arguments)])
    done.check_returncode()
    return done


def test_a_name_that_exists_gets_a_suffix(tmp_path) -> None:
    assert [create(tmp_path / "runs").path.name for _ in range(3)] == ["a", "a-2", "a-3"]


def test_a_place_where_no_directory_can_be_is_bad_input(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    for runs_dir in (tmp_path / "file", tmp_path / "file" / "runs"):
        with pytest.raises(BadInput, match=r"--runs-dir .*: cannot make a directory there"):
            RunDirectory.create(runs_dir, "a")


def test_newest_is_the_highest_suffix_as_a_number(tmp_path) -> None:
    assert RunDirectory.newest(tmp_path / "nowhere", "a") is None
    for name in ("a", "a-2", "a-10", "a-b", "aa-99", "b-11"):
        create(tmp_path, name)
    (tmp_path / "a-12").mkdir()  # not a run: no identity
    assert RunDirectory.newest(tmp_path, "a").path.name == "a-10"
    assert RunDirectory.newest(tmp_path, "a-b").path.name == "a-b"
    assert RunDirectory.newest(tmp_path, "c") is None
    assert RunDirectory.newest(tmp_path, "a.") is None


def test_a_run_is_found_by_name_or_path(tmp_path) -> None:
    path = create(tmp_path).path
    assert RunDirectory.find(tmp_path, "a").path == path
    assert RunDirectory.find(Path("elsewhere"), str(path)).path == path
    with pytest.raises(BadInput, match=r"no run 'b': neither b nor .*b is a run's directory"):
        RunDirectory.find(tmp_path, "b")


def test_run_identity_and_summary_are_read_back(tmp_path) -> None:
    directory = RunDirectory.create(tmp_path, "a")
    run = Run(seed=7, data=Data(dir='a "b"\n'))
    directory.describe(run, {"seed": 7, "list": [1, 2]})
    assert directory.run() == run
    assert directory.identity() == {"seed": 7, "list": [1, 2]}
    assert directory.summary() is None
    directory.write_summary({"accuracy": 0.5})
    assert directory.summary() == {"accuracy": 0.5}


def test_a_damaged_identity_is_one_line(tmp_path) -> None:
    directory = create(tmp_path)
    (directory.path / "identity.json").write_text("{")
    with pytest.raises(LockstepError, match=r"identity\.json: cannot be read"):
        directory.identity()


HOLD = """
import sys
from pathlib import Path
from lockstep.errors import LockstepError
from lockstep.runs.directory import RunDirectory
try:
    RunDirectory(Path(sys.argv[1])).hold()
    print("held")
except LockstepError as error:
    print(error)
"""


def test_a_directory_is_held_by_one_process_until_it_lets_go(tmp_path) -> None:
    directory = create(tmp_path)
    directory.hold()
    assert "is being trained by another process" in python(HOLD, directory.path).stdout
    directory.close()
    assert python(HOLD, directory.path).stdout == "held\n"
    directory.hold()  # the other process ended without letting go
    directory.close()


def rows(directory: RunDirectory) -> list[int]:
    text = (directory.path / "metrics.jsonl").read_text()
    return [json.loads(line)["step"] for line in text.splitlines()]


def restart(directory: RunDirectory, step: int) -> None:
    directory.start_log("metrics.jsonl", step)
    directory.add_row("metrics.jsonl", {"step": 100}, pytest.fail)
    directory.close()


def test_metrics_of_steps_to_be_done_again_are_dropped(tmp_path) -> None:
    directory = create(tmp_path)
    directory.start_log("metrics.jsonl", 0)
    for step in (1, 2, 3, 4):
        directory.add_row("metrics.jsonl", {"kind": "step", "step": step}, pytest.fail)
    directory.close()
    restart(directory, 2)
    assert rows(directory) == [1, 2, 100]


@pytest.mark.parametrize(
    "torn",
    [b'{"st', b'{"step": 2', b"\x00\x00\x00", b"\xff\xfe", b"3\n", b'{"step": null}\n', b"\n"],
)
def test_a_torn_row_is_dropped(tmp_path, torn: bytes) -> None:
    directory = create(tmp_path)
    (directory.path / "metrics.jsonl").write_bytes(b'{"step": 1}\n' + torn)
    restart(directory, 50)
    assert rows(directory) == [1, 100]


def test_a_row_without_its_line_end_is_kept_whole(tmp_path) -> None:
    directory = create(tmp_path)
    (directory.path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}')
    restart(directory, 50)
    assert rows(directory) == [1, 2, 100]


def test_a_row_can_be_read_as_soon_as_it_is_added(tmp_path) -> None:
    directory = create(tmp_path)
    directory.start_log("metrics.jsonl", 0)
    directory.add_row("metrics.jsonl", {"step": 1}, pytest.fail)
    assert rows(directory) == [1]
    directory.close()


FULL_DISK = """
import resource, sys
from pathlib import Path
from lockstep.runs.directory import RunDirectory
directory = RunDirectory(Path(sys.argv[1]))
directory.start_log("metrics.jsonl", 0)
directory.add_row("metrics.jsonl", {"step": 1}, print)
resource.setrlimit(resource.RLIMIT_FSIZE, (20, 1000))
directory.add_row("metrics.jsonl", {"step": 2, "text": "n" * 100}, print)
directory.add_row("metrics.jsonl", {"step": 3, "text": "n" * 100}, print)
if sys.argv[2] == "freed":
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    directory.add_row("metrics.jsonl", {"step": 4}, print)
directory.close()
print("closed")
"""


@pytest.mark.parametrize(("then", "kept"), [("full", [1]), ("freed", [1, 2, 3, 4])])
def test_a_full_disk_costs_rows_and_not_the_run(tmp_path, then: str, kept: list[int]) -> None:
    directory = create(tmp_path)
    lines = python(FULL_DISK, directory.path, then).stdout.splitlines()
    assert lines == ["metrics.jsonl: a row was lost: File too large"] * 2 + ["closed"]
    restart(directory, 50)
    assert rows(directory) == [*kept, 100]
