"""`lockstep sweep`: its runs are those of `lockstep train`, whatever stopped it; bad input; halving."""

import json
import os
import signal
import threading
import time
from argparse import Namespace

import forked
import pytest
from patience import PATIENCE_S
from small import OVERRIDES, command, rows, small_run, summary, train

from lockstep.cli.main import run
from lockstep.cli.search import run_pool

GRID = ["-o", "train.batch=16,32", "-o", "optimizer.lr=0.02,0.1"]
MORE = ["-o", "optimizer.lr=0.1,0.02", "-o", 'train.batch=16,32,"16@0,32@1"']

start_process = run_pool.start_training


@pytest.fixture(scope="module")
def patch():
    with pytest.MonkeyPatch.context() as context:
        yield context


@pytest.fixture(scope="module", autouse=True)
def forked_runs(patch):
    """Runs are forked of a process that has imported torch; their output goes where it would."""

    def start(words, said, env):
        place = f"/proc/{os.getpid()}/fd/{said.fileno()}"
        return forked.Forked(command(*words), env, terminal=place)

    patch.setattr(run_pool, "start_training", start)


def sweep(folder, *words):
    """Of the small run; what is given for a key replaces what that has."""
    given = {word.partition("=")[0] for word in words}
    keys = [
        part
        for item in OVERRIDES * ("mnist" not in words)
        if item.partition("=")[0] not in given
        for part in ("-o", item)
    ]
    start = ["sweep", "--runs-dir", str(folder), "--name", "s", "--device", "cpu", "--jobs", "2"]
    return run([*start, *keys, *words])


def hashes(folder):
    return {
        path.parent.name: summary(path.parent)["weights_sha256"] for path in folder.glob("s/*/summary.json")
    }


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("grid")
    assert sweep(folder, *GRID) == 0
    return folder


def test_every_run_is_that_of_train(undisturbed, tmp_path):
    found = hashes(undisturbed)
    assert set(found) == {"batch=16,lr=0.02", "batch=16,lr=0.1", "batch=32,lr=0.02", "batch=32,lr=0.1"}
    alone, _ = train(small_run("train.batch=16", "optimizer.lr=0.1"), tmp_path)
    assert found["batch=16,lr=0.1"] == alone.summary["weights_sha256"]
    assert len(set(found.values())) == 4


def test_what_is_finished_is_taken_as_it_is_and_values_are_added(undisturbed, tmp_path, capsys):
    before = hashes(undisturbed)
    times = {path: path.stat().st_mtime_ns for path in undisturbed.glob("s/*/summary.json")}
    picture = tmp_path / "sweep.png"
    assert sweep(undisturbed, *MORE, "--picture", str(picture)) == 0
    said = capsys.readouterr()
    assert "6 runs in" in said.err and "4 finished already; 2 at once" in said.err
    table = said.out.splitlines()
    assert table[0].split()[:4] == ["batch", "lr", "epochs", "accuracy"] and "test images" in table[7]
    accuracies = [float(line.split()[3]) for line in table[1:7]]
    assert accuracies == sorted(accuracies, reverse=True) and picture.is_file()
    assert before.items() < hashes(undisturbed).items() and len(hashes(undisturbed)) == 6
    assert all(path.stat().st_mtime_ns == then for path, then in times.items())
    assert sweep(undisturbed, *GRID) == 2 and "or another --name" in capsys.readouterr().err


def test_records(undisturbed, capsys):
    assert sweep(undisturbed, *MORE, "--json") == 0
    records = json.loads(capsys.readouterr().out)
    assert len(records) == 6 and [r["value"] for r in records] == sorted(
        (r["value"] for r in records), reverse=True
    )
    assert {tuple(r["details"]["weights_sha256"]) for r in records} == {
        (h,) for h in hashes(undisturbed).values()
    }
    assert records[0]["unit"] == "%" and records[0]["n"] == 1 and records[0]["details"]["split"] == "test"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_stopped_and_gone_on_with_to_the_same_bits(undisturbed, tmp_path, capsys, number, code):
    stopper = threading.Thread(target=stop_in_the_middle, args=(tmp_path / "s", number))
    stopper.start()
    assert sweep(tmp_path, *GRID) == code
    stopper.join()
    said = capsys.readouterr().err
    assert f"{number.name}: 2 runs save their state" in said and "the same command goes on" in said
    assert not (tmp_path / "s/batch=32,lr=0.1").exists(), "it had not begun"
    assert sweep(tmp_path, *GRID) == 0
    assert "batch=16,lr=0.02: goes on" in capsys.readouterr().err
    expected = hashes(undisturbed)
    assert (
        hashes(tmp_path) == {name: expected[name] for name in hashes(tmp_path)} and len(hashes(tmp_path)) == 4
    )


def stop_in_the_middle(folder, number):
    """Once both of the first runs have done a step."""
    end = time.monotonic() + PATIENCE_S
    logs = [folder / name / "metrics.jsonl" for name in ("batch=16,lr=0.02", "batch=16,lr=0.1")]
    while time.monotonic() < end and not all(
        log.is_file() and log.read_bytes().count(b"\n") > 2 for log in logs
    ):
        time.sleep(0.005)
    os.kill(os.getpid(), number)


@pytest.mark.gloo
def test_runs_are_processes_of_their_own_with_workers_of_theirs(undisturbed, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run_pool, "start_training", start_process)
    grid = ["-o", "train.batch=16", "-o", "optimizer.lr=0.1", "--seeds", "0"]
    assert sweep(tmp_path, *grid, "--workers", "2") == 0, capsys.readouterr().err
    assert hashes(tmp_path) == {"seed=0": hashes(undisturbed)["batch=16,lr=0.1"]}
    assert summary(tmp_path / "s/seed=0")["workers"] == 2


def test_a_run_that_fails_does_not_end_the_others(tmp_path, capsys):
    assert sweep(tmp_path, "-o", "optimizer.lr=1e30,0.05", "--seeds", "0,1") == 1
    said = capsys.readouterr()
    assert "lr=1e+30,seed=0: FAILED: " in said.err and "not finite" in said.err
    assert set(hashes(tmp_path)) == {"lr=0.05,seed=0", "lr=0.05,seed=1"}
    lines = said.out.splitlines()
    assert lines[0].split()[:4] == ["lr", "seed", "mean", "spread"]
    assert [line.split()[0] for line in lines[1:5]] == [
        "0.05",
        "0.05",
        "1e+30",
        "1e+30",
    ] and "FAILED" in lines[3]
    means = {line.split()[2] for line in lines[1:3]}
    assert len(means) == 1


def test_halving_goes_on_with_the_best_by_validation(tmp_path, capsys):
    words = ["-o", "optimizer.lr=0.0001,0.05,0.1,0.001", "-o", "data.num_val=64", "-o", "train.epochs=4"]
    words += ["--search", "halving", "--rungs", "2"]
    assert sweep(tmp_path, *words) == 0
    said = capsys.readouterr()
    assert "compared after 2 of 4 epochs" in said.err and "2 of 4 go on" in said.err
    names = [f"lr={lr}" for lr in ("0.0001", "0.05", "0.1", "0.001")]
    epochs = {name: rows(tmp_path / "s" / name, "epoch") for name in names}
    scores = {name: found[1]["val_accuracy"] for name, found in epochs.items()}
    best = sorted(names, key=lambda name: -scores[name])[:2]
    assert {name: len(found) for name, found in epochs.items()} == {n: 4 if n in best else 2 for n in names}
    assert set(hashes(tmp_path)) == set(best)
    overrides = ("data.num_val=64", "train.epochs=4", f"optimizer.{best[0]}")
    alone, _ = train(small_run(*overrides), tmp_path / "alone")
    assert hashes(tmp_path)[best[0]] == alone.summary["weights_sha256"]
    assert "validation images" in said.out
    assert sweep(tmp_path, *words) == 0 and "starts" not in capsys.readouterr().err


HALVING = ["-o", "optimizer.lr=0.1,1", "--search", "halving"]
BAD = {
    "nothing": ([], "nothing to sweep"),
    "batch": (["-o", "train.batch=16,18"], "combination batch=18: train.batch=18 is not divisible"),
    "too many": (["-o", "train.batch=32,512"], "combination batch=512: train.batch=512 is more than the 330"),
    "by epoch": (["-o", "train.batch=16@0,32@1"], "-o 'train.batch=\"16@0,32@1\"'"),
    "key": (["-o", "optimizer.lrr=1,2"], "did you mean 'lr'?"),
    "value": (["-o", "model.name=lenet5,lenet"], "combination name=lenet: unknown model 'lenet'"),
    "data": (["mnist", "-o", "data.dir=nowhere,gone"], "combination dir=nowhere: data.dir=nowhere: no such"),
    "weights": (["-o", "model.weights=nowhere.safetensors,b.safetensors"], "nowhere.safetensors"),
    "twice": (["-o", "optimizer.lr=1,1.0"], "1.0 is there twice"),
    "key twice": (["-o", "optimizer.lr=1,2", "-o", "optimizer.lr=3"], "optimizer.lr is given twice"),
    "range": (["-o", "optimizer.lr=0.1..1"], "give --search random"),
    "samples": (["-o", "optimizer.lr=0.1,1", "--samples", "3"], "--samples 3 is for --search random"),
    "no samples": (["-o", "optimizer.lr=0.1..1", "--search", "random"], "--search random needs --samples"),
    "seeds": (["--seeds", "0,a"], "--seeds 0,a must be whole numbers"),
    "seed": (["-o", "optimizer.lr=0.1,1", "--seed", "1"], "give --seeds"),
    "jobs": (["-o", "optimizer.lr=0.1,1", "--jobs", "0"], "--jobs 0 must be"),
    "rungs": (["-o", "optimizer.lr=0.1,1", "--rungs", "2"], "--rungs 2 is for --search halving"),
    "keep": ([*HALVING, "--keep", "1"], "--keep 1 must be"),
    "no validation": ([*HALVING, "--rungs", "2"], "-o data.num_val=1000"),
    "too short": ([*HALVING, "-o", "data.num_val=9"], "is too short for"),
    "workers": (["-o", "train.lanes=2,4", "--workers", "4"], "combination lanes=2: 4 workers are more than"),
    "name": (["-o", "optimizer.lr=0.1,1", "--name", "a/b"], "must be the name of a folder"),
    "taken": (["-o", "optimizer.lr=0.1,1", "--name", "taken"], "is no sweep (it has no sweep.json)"),
    "picture": (["-o", "optimizer.lr=0.1,1", "--picture", "sweep.jpg"], "pictures are PNG files"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_before_any_run(case, tmp_path, capsys):
    (tmp_path / "taken").mkdir()
    words, message = BAD[case]
    assert sweep(tmp_path, *words) == 2
    said = capsys.readouterr().err
    assert message in said and said.startswith("lockstep: ") and len(said.splitlines()) == 1, said
    assert [path.name for path in tmp_path.rglob("*")] == ["taken"], "nothing may be written"


def test_runs_have_gpus_of_their_own(monkeypatch):
    monkeypatch.setattr(run_pool, "_count_gpus", lambda options: 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    pair = Namespace(workers=2, jobs="auto")
    assert run_pool.count_jobs(pair, []) == 2
    seen = [run_pool.find_devices(slot, pair)["CUDA_VISIBLE_DEVICES"] for slot in range(3)]
    assert seen == ["4,5", "6,7", "4,5"]
    assert run_pool.find_devices(1, Namespace(workers="auto"))["CUDA_VISIBLE_DEVICES"] == "4,5,6,7"
