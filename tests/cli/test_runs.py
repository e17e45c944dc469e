"""`lockstep runs`: what is listed, what differs, and that pruning leaves what is needed."""

import json

import pytest
from small import small_run, train

from lockstep.cli.main import run
from lockstep.runs.directory import RunDirectory


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    """Two equal runs, one of another rate that was stopped, and a folder that is none."""
    folder = tmp_path_factory.mktemp("shelf")
    keys = ("checkpoint.keep=99", "train.epochs=1")
    for name in ("a", "b"):
        train(small_run(*keys), folder, launch={"name": name})

    def stop(event):
        if getattr(event, "step", 0) == 7:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        train(small_run(*keys, "optimizer.lr=0.01"), folder / "deeper", on_event=stop, launch={"name": "c"})
    (folder / "notes").mkdir()
    return folder


def tell(capsys, shelf, *words):
    code = run(["runs", *words, "--runs-dir", str(shelf)])
    out, err = capsys.readouterr()
    return code, out, err


def steps(path):
    return sorted(int(file.stem.split("-")[1]) for file in (path / "checkpoints").glob("*.json"))


def test_runs_are_listed_with_their_state(shelf, capsys):
    code, out, _ = tell(capsys, shelf, "list")
    lines = out.splitlines()
    assert code == 0 and [line.split()[:3] for line in lines[1:4]] == [
        ["a", "finished", "1/1"],
        ["b", "finished", "1/1"],
        ["deeper/c", "stopped", "0/1"],
    ]
    assert lines[4].startswith("3 runs, ")
    _, out, _ = tell(capsys, shelf, "list", "--json")
    first, second, third = json.loads(out)
    assert first["weights_sha256"] == second["weights_sha256"] and third["weights_sha256"] is None
    assert first["checkpoints"] == [0, 3, 6, 9, 10] and first["seconds"] > 0
    held = RunDirectory(shelf / "a")
    held.hold()
    assert "training" in tell(capsys, shelf, "list")[1]
    held.close()


def test_runs_are_compared(shelf, capsys):
    code, out, _ = tell(capsys, shelf, "compare", "a", "b")
    assert code == 0 and "no setting differs" in out and "all end with the same weights, bit for bit" in out
    _, out, _ = tell(capsys, shelf, "compare", "a", "b", str(shelf / "deeper" / "c"))
    (rate,) = [line.split() for line in out.splitlines() if line.startswith("optimizer.")]
    assert rate[0] == "optimizer.lr" and rate[1] == rate[2] and rate[3] == "0.01"
    assert "the same weights, bit for bit: a and b; what is not finished has no hash yet" in out
    assert tell(capsys, shelf, "compare", "a")[0] == 2
    assert tell(capsys, shelf, "compare", "a", "nobody")[0] == 2


def test_pruning_asks_first_and_leaves_what_is_needed(shelf, capsys):
    code, out, _ = tell(capsys, shelf, "prune", "a")
    assert code == 0 and ": 8 files, " in out and "stays: steps 10\n" in out
    assert "would be removed; --yes removes them" in out and steps(shelf / "a") == [0, 3, 6, 9, 10]
    newest = shelf / "deeper" / "c" / "checkpoints" / "step-000000006.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    held = RunDirectory(shelf / "b")
    held.hold()
    code, out, _ = tell(capsys, shelf, "prune", "--yes", "--keep", "2")
    held.close()
    assert code == 0 and steps(shelf / "a") == [9, 10] and steps(shelf / "b") == [0, 3, 6, 9, 10]
    assert steps(shelf / "deeper" / "c") == [0, 3, 6], "its newest is damaged"
    assert "is being trained by another process" in out and "so the ones before it stay" in out
    assert "6 files" in out.splitlines()[-1] and "removed" in out.splitlines()[-1]
    assert tell(capsys, shelf, "prune", "--keep", "0")[0] == 2
    assert tell(capsys, shelf, "prune", "a", "--yes")[1].splitlines()[-1].startswith("2 files")
    assert steps(shelf / "a") == [10], "it is the best, too"
