"""`--track`: a tracker gets the run's rows; whatever it does, training does not wait, nor change a bit."""

import io
import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec

import forked
import pytest
from small import rows, small_run, summary, train, train_command

import lockstep
from lockstep.cli.main import run
from lockstep.cli.watch.follow import Words, follow, scalars
from lockstep.runs.event import Notice
from lockstep.spec.system import extra_command


class Kept:
    """A tracker that keeps what it is given."""

    def __init__(self):
        self.known, self.points, self.ends = [], [], []

    def open(self, folder, told, known):
        self.known.append(known)
        return known or "first", str(folder)

    def log(self, points):
        self.points += points

    def close(self, state, summary):
        self.ends.append((state, summary))


def followed(tracker, directory, *last):
    (directory / "kept").mkdir(exist_ok=True)
    lines = [{"folder": str(directory / "kept"), "name": "run", "settings": {}}, *last]
    said = []
    follow(tracker, Words(io.StringIO("".join(json.dumps(line) + "\n" for line in lines))), said.append)
    signal.alarm(0)
    return said


def test_a_tracker_gets_each_row_once_over_stops_and_kills(tmp_path):
    train(small_run(), tmp_path)
    metrics = tmp_path / "run" / "metrics.jsonl"
    whole = metrics.read_text().splitlines(keepends=True)
    tracker = Kept()
    metrics.write_text("".join(whole[:5]) + whole[5][:9])  # as it is read while a row is written
    assert followed(tracker, tmp_path / "run") == [f"tracked at {tmp_path / 'run' / 'kept'}"]
    metrics.write_text("".join(whole[:3]))  # a resume from an earlier checkpoint
    followed(tracker, tmp_path / "run", {"state": "stopped", "summary": {}, "patience_s": 30})
    metrics.write_text("".join(whole))
    followed(tracker, tmp_path / "run", {"state": "finished", "summary": {"accuracy": 0.5}, "patience_s": 30})
    assert tracker.known == ["", "first", "first"]
    assert tracker.ends == [("lost", {}), ("stopped", {}), ("finished", {"accuracy": 0.5})]
    steps, epochs = (rows(tmp_path / "run", kind) for kind in ("step", "epoch"))

    def got(name):
        return [(step, values[name]) for step, values in tracker.points if name in values]

    assert got("step/loss") == [(row["step"], row["loss"]) for row in steps] and len(steps) == 20
    assert got("epoch/test_loss") == [(row["step"], row["test_loss"]) for row in epochs]


def test_measurements_are_all_numbers_of_a_row_but_its_place():
    row = {
        "kind": "epoch",
        "epoch": 3,
        "step": 40,
        "test_f1": 0.5,
        "best": True,
        "split": "test",
        "positions": [0, 9],
    }
    assert scalars(row) == {"test_f1": 0.5}


# packages of that name that do what a tracker does with no network, no login or a bug
BROKEN = {
    "fails": "def init(**told):\n    raise ConnectionError('no route\\nto host')",
    "hangs": "import time\ndef init(**told):\n    time.sleep(1000)",
    "ends": "import os\nos._exit(7)",
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_tracker_that_fails_is_told_once_and_training_does_not_notice(how, tmp_path, monkeypatch):
    (tmp_path / "wandb.py").write_text(
        f"{BROKEN[how]}\nclass Settings:\n    def __init__(self, **given): ...\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("lockstep.cli.watch.tracking._PATIENCE_S", {"finished": 1})
    plain, _ = train(small_run("train.epochs=1"), tmp_path / "plain")
    result, events = train(
        small_run("train.epochs=1"), tmp_path / "runs", by=lockstep.train, launch={"track": ("wandb",)}
    )
    assert result.summary["weights_sha256"] == plain.summary["weights_sha256"]
    told = [event for event in events if isinstance(event, Notice) and event.text.startswith("wandb: ")]
    assert len(told) == 1 and told[0].warning, told
    what = {"fails": "ConnectionError: no route;", "hangs": "in time", "ends": "ended by code 7"}[how]
    assert what in told[0].text and (tmp_path / "runs" / "run" / "wandb" / "log.txt").exists()


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_a_missing_package_is_told_before_any_work(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / name).mkdir()  # a folder, such as W&B makes where it is called, is no package
    assert run(["train", "--track", name]) == 2
    error = f"lockstep: --track {name} needs the extra: {extra_command(name)}\n"
    assert capsys.readouterr().err == error and not (tmp_path / "runs").exists()


def test_an_unknown_tracker_is_refused():
    with pytest.raises(lockstep.LockstepError, match="did you mean 'wandb'"):
        lockstep.Launch(track=("wandp",))
    assert lockstep.Launch(track="mlflow").track == ("mlflow",)


MORE = {"PYTHONPATH": os.pathsep.join(sys.path), "MLFLOW_ALLOW_FILE_STORE": "true"}
# a file of W&B is a log in LevelDB's form: blocks of 32 KiB, with records in pieces of (sum, length, kind)
READ_WANDB = """
import json, struct, sys
from pathlib import Path
from wandb.proto.wandb_internal_pb2 import Record
for path in sys.argv[1:]:
    data, at, whole, rows, summary, code = Path(path).read_bytes(), 7, b"", [], {}, None
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            record, whole = Record.FromString(whole), b""
            told = record.history.item
            rows += [{"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in told}]
            summary |= {item.key: json.loads(item.value_json) for item in record.summary.update}
            code = record.exit.exit_code if record.HasField("exit") else code
    print(json.dumps([[row for row in rows if row], summary, code]))
"""


def tracked(name, runs_dir, *arguments, launches=False):
    """`lockstep train --track NAME` as its package is used, without network."""
    folder = str(runs_dir.parent)
    found = {
        **os.environ,
        **MORE,
        "WANDB_MODE": "offline",
        "MLFLOW_TRACKING_URI": f"file:{folder}/store",
        "MLFLOW_EXPERIMENT_NAME": "small",
    }
    done = forked.call(
        train_command(runs_dir, "--track", name, *arguments),
        env=found,
        cwd=runs_dir.parent,
        launches=launches,
    )
    assert done.returncode == 0 and "warning" not in done.stderr, done.stderr + done.stdout
    assert f"{name}: tracked at" in done.stdout
    return json.loads((runs_dir / "run" / name / "tracked.json").read_text())


@pytest.mark.skipif(not find_spec("mlflow"), reason="MLflow is not installed: the extra mlflow")
def test_mlflow_has_one_run_with_each_step_over_a_stop_and_other_workers(tmp_path):
    first = tracked("mlflow", tmp_path / "runs", "--workers", "2", "--stop-after-epochs", "1", launches=True)
    read = [
        "import json, sys; from mlflow import MlflowClient; client = MlflowClient(sys.argv[1])",
        "(found,) = client.search_experiments(filter_string=\"name = 'small'\")",
        "(run,) = client.search_runs([found.experiment_id])",
        "points = client.get_metric_history(run.info.run_id, 'step/loss')",
        "told = [run.info.run_id, run.info.run_name, run.info.status, run.data.params['train.epochs']]",
        "print(json.dumps([*told, run.data.tags, [[p.step, p.value] for p in points]]))",
    ]

    def stored():
        done = subprocess.run(
            [sys.executable, "-c", "\n".join(read), f"file:{tmp_path}/store"],
            env={**os.environ, **MORE},
            capture_output=True,
            text=True,
            check=True,
        )
        return json.loads(done.stdout)

    assert stored()[:4] == [first["id"], "run", "KILLED", "2"] and stored()[4]["state"] == "stopped"
    assert tracked("mlflow", tmp_path / "runs", "--resume", "run")["id"] == first["id"]
    *_, status, _, tags, points = stored()
    assert status == "FINISHED" and tags["state"] == "finished"
    assert tags["weights_sha256"] == summary(tmp_path / "runs" / "run")["weights_sha256"]
    assert points == [[row["step"], row["loss"]] for row in rows(tmp_path / "runs" / "run", "step")]


@pytest.mark.skipif(not find_spec("wandb"), reason="W&B is not installed: the extra wandb")
def test_wandb_has_the_rows_and_goes_on_under_the_same_id(tmp_path):
    first = tracked("wandb", tmp_path / "runs", "--stop-after-epochs", "1")
    again = tracked("wandb", tmp_path / "runs", "--resume", "run")
    assert again == {"id": first["id"], "step": 20, "epoch": 1}
    files = sorted((tmp_path / "runs" / "run" / "wandb").glob(f"wandb/offline-run-*/run-{first['id']}.wandb"))
    done = subprocess.run(
        [sys.executable, "-c", READ_WANDB, *map(str, files)],
        env={**os.environ, **MORE},
        capture_output=True,
        text=True,
        check=True,
    )
    (stopped, _, stopped_code), (finished, told, code) = map(json.loads, done.stdout.splitlines())
    assert (stopped_code, code) == (1, 0) and told["state"] == "finished"
    assert told["weights_sha256"] == summary(tmp_path / "runs" / "run")["weights_sha256"]
    got = {row["_step"]: row["step/loss"] for row in [*stopped, *finished] if "step/loss" in row}
    assert got == {row["step"]: row["loss"] for row in rows(tmp_path / "runs" / "run", "step")}
