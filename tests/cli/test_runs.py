"""`lockstep runs`: what is listed, what differs, and that pruning leaves what is needed."""

import json
import shutil

import pytest
from small import small_run, train

from lockstep.cli.main import run
from lockstep.runs.directory import RunDirectory


@pytest.fixture(scope="module")
def folder_of_runs(tmp_path_factory):
    """Two equal runs, one of another rate that was stopped, and a folder that is none."""
    folder = tmp_path_factory.mktemp("runs")
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


def tell(capsys, folder_of_runs, *words):
    code = run(["runs", *words, "--runs-dir", str(folder_of_runs)])
    out, err = capsys.readouterr()
    return code, out, err


def steps(path):
    return sorted(int(file.stem.split("-")[1]) for file in (path / "checkpoints").glob("*.json"))


def test_runs_are_listed_with_their_state(folder_of_runs, capsys):
    code, out, _ = tell(capsys, folder_of_runs, "list")
    lines = out.splitlines()
    assert code == 0 and [line.split()[:3] for line in lines[1:4]] == [
        ["a", "finished", "1/1"],
        ["b", "finished", "1/1"],
        ["deeper/c", "stopped", "0/1"],
    ]
    assert lines[4].startswith("3 runs, ")
    _, out, _ = tell(capsys, folder_of_runs, "list", "--json")
    first, second, third = json.loads(out)
    assert first["weights_sha256"] == second["weights_sha256"] and third["weights_sha256"] is None
    assert first["checkpoints"] == [0, 3, 6, 9, 10] and first["seconds"] > 0
    held = RunDirectory(folder_of_runs / "a")
    held.hold()
    assert "training" in tell(capsys, folder_of_runs, "list")[1]
    held.close()


@pytest.mark.parametrize("row", ["[]", "null", "{}", '{"kind": "step"}'])
def test_a_run_whose_rows_are_none_is_named_and_the_others_are_listed(row, folder_of_runs, tmp_path, capsys):
    for name in ("a", "b"):
        shutil.copytree(folder_of_runs / name, tmp_path / name)
    with (tmp_path / "a" / "metrics.jsonl").open("a") as file:
        file.write(f"{row}\n")
    code, out, err = tell(capsys, tmp_path, "list")
    assert code == 0 and "\n1 run, " in out and not err
    assert out.splitlines()[-1].startswith(f"{tmp_path / 'a'}: metrics.jsonl or summary.json is not as")
    code, _, err = tell(capsys, tmp_path, "compare", "a", "b")
    assert code == 1 and len(err.splitlines()) == 1


def test_runs_are_compared(folder_of_runs, capsys):
    code, out, _ = tell(capsys, folder_of_runs, "compare", "a", "b")
    assert code == 0 and "no setting differs" in out and "all end with the same weights, bit for bit" in out
    _, out, _ = tell(capsys, folder_of_runs, "compare", "a", "b", str(folder_of_runs / "deeper" / "c"))
    (rate,) = [line.split() for line in out.splitlines() if line.startswith("optimizer.")]
    assert rate[0] == "optimizer.lr" and rate[1] == rate[2] and rate[3] == "0.01"
    assert "the same weights, bit for bit: a and b; what is not finished has no hash yet" in out
    assert tell(capsys, folder_of_runs, "compare", "a")[0] == 2
    assert tell(capsys, folder_of_runs, "compare", "a", "nobody")[0] == 2


def test_pruning_asks_first_and_leaves_what_is_needed(folder_of_runs, capsys):
    code, out, _ = tell(capsys, folder_of_runs, "prune", "a")
    assert code == 0 and ": 8 files, " in out and "stays: steps 10\n" in out
    assert "would be removed; --yes removes them" in out and steps(folder_of_runs / "a") == [0, 3, 6, 9, 10]
    newest = folder_of_runs / "deeper" / "c" / "checkpoints" / "step-000000006.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    held = RunDirectory(folder_of_runs / "b")
    held.hold()
    code, out, _ = tell(capsys, folder_of_runs, "prune", "--yes", "--keep", "2")
    held.close()
    assert (
        code == 0
        and steps(folder_of_runs / "a") == [9, 10]
        and steps(folder_of_runs / "b") == [0, 3, 6, 9, 10]
    )
    assert steps(folder_of_runs / "deeper" / "c") == [0, 3, 6], "its newest is damaged"
    assert "is being trained by another process" in out and "so the ones before it stay" in out
    assert "6 files" in out.splitlines()[-1] and "removed" in out.splitlines()[-1]
    assert tell(capsys, folder_of_runs, "prune", "--keep", "0")[0] == 2
    assert tell(capsys, folder_of_runs, "prune", "a", "--yes")[1].splitlines()[-1].startswith("2 files")
    assert steps(folder_of_runs / "a") == [10], "it is the best, too"


def test_a_checkpoint_of_another_run_does_not_push_out_the_own_ones(folder_of_runs, tmp_path, capsys):
    shutil.copytree(folder_of_runs / "deeper" / "c", tmp_path / "c")
    newest = max(steps(folder_of_runs / "b"))
    for file in (folder_of_runs / "b" / "checkpoints").glob(f"*{newest}.*"):
        shutil.copy(file, tmp_path / "c" / "checkpoints")
    before = steps(tmp_path / "c")
    out = tell(capsys, tmp_path, "prune", "--yes")[1]
    assert "is a checkpoint of another run" in out and steps(tmp_path / "c") == before and len(before) > 1
