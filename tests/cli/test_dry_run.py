"""`lockstep train --dry-run`: what it tells of every worker, that nothing is written, how it ends."""

import re
from dataclasses import replace

import pytest
from forked import call
from small import OVERRIDES, small_run, train, train_command

from lockstep.cli.main import run
from lockstep.cli.watch.tried import describe_try
from lockstep.errors import Paused, SpecError
from lockstep.runs.event import Tried
from lockstep.spec import Launch


def words(folder, *more):
    keys = [part for key in OVERRIDES for part in ("-o", key)]
    return ["train", "--runs-dir", str(folder / "runs"), "--device", "cpu", "--dry-run", *keys, *more]


def test_it_tells_time_and_memory_and_writes_nothing(tmp_path, capsys):
    assert run(words(tmp_path)) == 0
    out, err = capsys.readouterr()
    assert err == "lockstep: --dry-run: the first steps were done in memory, and nothing was written\n"
    assert "dry run of lenet5 (" in out and "batch 32 in 4 lanes, fp32, stock kernels, 1 worker;" in out
    assert re.search(
        r"worker 0 on \S+ \(cpu, .*\), lanes 0 to 3: built in .*, the first step .*, the next", out
    )
    assert re.search(r"MB at its peak, of which [\d,.]+ MB for the model and its steps\n", out)
    assert re.search(r"an epoch of 10 steps takes about .* and the run of 20 steps", out)
    assert re.search(r"a checkpoint is \d\.\d MB", out)
    assert not list(tmp_path.iterdir())


def test_in_python_the_event_has_the_numbers(tmp_path):
    events = []
    with pytest.raises(Paused):
        train(small_run("train.local_steps=2"), tmp_path, on_event=events.append, launch={"dry_run": True})
    (tried,) = [event for event in events if isinstance(event, Tried)]
    (worker,) = tried.workers
    assert worker["first_s"] > 0 and worker["step_s"] > 0 and tried.steps == (10, 10)
    again = replace(tried, run=small_run("train.recompute=true"))
    assert [
        any("without train.recompute;" in line for line in describe_try(one)) for one in (tried, again)
    ] == [
        False,
        True,
    ]
    assert 0 < worker["taken_bytes"] < worker["peak_bytes"] and tried.predicted_bytes > 0
    result, _ = train(small_run("train.epochs=1"), tmp_path)
    (saved,) = (result.directory / "checkpoints").glob("step-*10.safetensors")
    assert 0 < saved.stat().st_size - tried.state_bytes < 5000, "its header"


@pytest.mark.gloo
def test_every_worker_of_a_plan_is_told_of(tmp_path):
    done = call(train_command(tmp_path / "runs", "--dry-run", "--plan", "pipeline=2"), launches=True)
    assert done.returncode == 0, done.stderr
    assert "2 workers, plan pipeline=2" in done.stdout or "2 workers, plan data=1,pipeline=2" in done.stdout
    for stage in (0, 1):
        assert re.search(rf"worker {stage} on .*, stage {stage}, lanes 0 to 3: built", done.stdout)
    assert not list(tmp_path.iterdir())


def test_bad_ends_have_their_codes(tmp_path, capsys):
    assert run(words(tmp_path, "-o", "optimizer.lr=1e38")) == 1, "the second step is not finite"
    assert "not finite" in capsys.readouterr().err
    assert run(words(tmp_path, "--resume", "auto")) == 2
    assert run(words(tmp_path, "-o", "data.size=3")) == 2
    with pytest.raises(SpecError, match="--resume auto and --dry-run exclude each other"):
        Launch(resume="auto", dry_run=True)
    assert not list(tmp_path.iterdir())
