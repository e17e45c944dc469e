"""`lockstep verify` on really trained runs: equal ones, one altered in a bit, other seeds, damaged files."""

import json
import shutil

import pytest
from forked import call
from small import small_run, train, train_command

import lockstep
from lockstep.cli.main import run
from lockstep.runs import checkpoint
from lockstep.runs.directory import RunDirectory
from lockstep.runs.train_state import TrainState

# 10 steps, and checkpoints of 0, 3, 6, 9 and 10
OVERRIDES = ("train.epochs=1", "train.ema=0.9", "checkpoint.keep=9")
WEIGHT = "model.blocks.block2.0.weight"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two that are equal, one of them by 2 workers; another seed; another model."""
    folder = tmp_path_factory.mktemp("runs")
    traced = {"name": "alone", "trace": True}
    train(small_run(*OVERRIDES), folder, launch=traced)
    train(small_run(*OVERRIDES, "seed=1"), folder, launch={**traced, "name": "seed"})
    train(
        small_run(*OVERRIDES, "model.name=emotion48", "data.size=48", "data.num_train=64"),
        folder,
        launch={"name": "model"},
    )
    words = train_command(folder, "--workers", "2", "--trace", "--name", "two", overrides=OVERRIDES)
    done = call(words, launches=True)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def copy(runs, tmp_path):
    """A copy of a run that a test may change."""

    def make(name):
        return shutil.copytree(runs / name, tmp_path / f"{name}-copy")

    return make


def verify(runs, capsys, a, b, *flags):
    """The exit code, and what was printed, of which all is on one of the two streams."""
    code = run(["verify", str(a), str(b), "--runs-dir", str(runs), *flags])
    out, err = capsys.readouterr()
    assert bool(out) != bool(err)
    return code, (json.loads(out) if "--json" in flags else out + err)


def flip(directory, step, name, place):
    """Save a checkpoint again with the last bit of one element flipped."""
    folder = directory / "checkpoints"
    saved = checkpoint.load_checkpoint(checkpoint.checkpoint_steps(folder)[step])
    made = RunDirectory(directory).run()
    state = TrainState.begin(lockstep.load(directory), made.optimizer, made.train.ema)
    saved.restore(state)
    bits = state.named()[name].detach().view(-1).numpy().view("int32")
    bits[place] ^= 1
    checkpoint.NewCheckpoint(folder, state.cursor(), saved.manifest["identity"], 99).write(state.pieces())


def content(directory):
    return {path: (path.stat().st_mtime_ns, path.is_file() and path.read_bytes())
            for path in sorted(directory.rglob("*"))}  # fmt: skip


@pytest.mark.gloo
def test_one_worker_and_two_are_identical(runs, capsys):
    before = content(runs)
    code, text = verify(runs, capsys, "alone", runs / "two")
    weights = json.loads((runs / "alone" / "summary.json").read_text())["weights_sha256"]
    assert code == 0 and text.startswith(f"identical: weights_sha256 {weights} (step 10)\n")
    assert "weights, optimizer, averaged weights of step 10, checkpoints of 0, 3, 6, 9" in text
    assert "traces of 11 steps, 0 to 10" in text and "  same identity\n" in text
    assert text.count("finished at step 10") == 2
    code, found = verify(runs, capsys, "alone", "two", "--json")
    assert (
        code == 0
        and found["identical"]
        and found["complete"]
        and found["equal_state"]["weights_sha256"] == weights
    )
    assert content(runs) == before


def test_one_flipped_bit_is_located(runs, copy, capsys):
    other = copy("two")
    flip(other, 6, WEIGHT, 2 * 150 + 25 + 5 + 3)  # of shape (16, 6, 5, 5)
    code, text = verify(runs, capsys, "alone", other)
    assert code == 1 and "different: first at step 6, last equal at step 5 (by their checkpoints)" in text
    assert f"tensor: {WEIGHT}, the only one to differ at step 6" in text
    assert (
        f"in the checkpoints of step 6, {WEIGHT}[2, 1, 1, 3] is\n" in text and "in B: 1 ulp apart\n" in text
    )
    assert "1 of 2400 elements of this tensor; 1 of 30 tensors differ" in text
    assert "note: the traces of step 6 are equal" in text and "same identity" in text
    (other / "trace.jsonl").unlink()
    code, text = verify(runs, capsys, other, "alone")
    assert code == 1 and "first at step 6, last equal at step 3" in text and "hint: " in text
    _, found = verify(runs, capsys, other, "alone", "--json")
    assert (found["first_different_step"], found["last_equal_step"], found["tensor"]) == (6, 3, WEIGHT)
    assert found["checkpoint"]["element"]["index"] == [2, 1, 1, 3] and found["found_by"] == "checkpoint"


def test_traces_name_the_exact_step(runs, copy, capsys):
    other = copy("alone")
    path = other / "trace.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows[5:]:
        row["tensors"][WEIGHT] = "0" * 16
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flip(other, 6, WEIGHT, 0)
    code, text = verify(runs, capsys, "alone", other)
    assert code == 1 and "different: first at step 5, last equal at step 4 (by their traces)" in text
    assert f"in the checkpoints of step 6, {WEIGHT}[0, 0, 0, 0]" in text
    shutil.rmtree(other / "checkpoints")
    code, text = verify(runs, capsys, "alone", other)
    assert code == 1 and "no common checkpoint at or after step 5" in text


def test_a_run_that_went_on_from_a_flipped_bit(runs, copy, capsys):
    other = copy("alone")
    (other / "summary.json").unlink()
    for step in (9, 10):
        (other / "checkpoints" / f"step-{step:09d}.json").unlink()
    flip(other, 6, WEIGHT, 0)
    train(small_run(*OVERRIDES), other.parent, launch={"resume": str(other), "trace": True})
    code, text = verify(runs, capsys, "alone", other)
    assert code == 1 and "different: first at step 6, last equal at step 5 (by their traces)" in text
    assert f"tensor: {WEIGHT}, the only one to differ at step 6" in text and "in B: 1 ulp apart" in text
    flip(other, 6, WEIGHT, 0)  # back, and the trace's row with it: only what came of it is left
    rows = (other / "trace.jsonl").read_text().splitlines(keepends=True)
    (other / "trace.jsonl").write_text("".join(rows[:7] + rows[8:]))
    code, text = verify(runs, capsys, "alone", other)
    assert code == 1 and "different: first at step 7, last equal at step 6 (by their traces)" in text
    assert "in the checkpoints of step 9, " in text and "same identity" in text


def test_another_seed_is_named(runs, capsys):
    code, text = verify(runs, capsys, "alone", "seed")
    assert code == 1 and "  identity: seed: 0 in A, 1 in B\n" in text and "same identity" not in text
    assert "different: first at step 0, the very first state" in text


def test_another_model_is_reported_plainly(runs, capsys):
    code, text = verify(runs, capsys, "alone", "model")
    assert code == 1 and "identity: model.name: lenet5 in A, emotion48 in B" in text
    assert "model.blocks.block1.0.bias is float32 (6,) in A, float32 (32,) in B\n" in text
    assert verify(runs, capsys, "model", "alone", "--json")[0] == 1


def test_an_unfinished_run_under_training_is_compared_as_far_as_it_came(runs, copy, capsys):
    other = copy("alone")
    (other / "summary.json").unlink()
    for step in (9, 10):
        (other / "checkpoints" / f"step-{step:09d}.json").unlink()
    trace = (other / "trace.jsonl").read_bytes().splitlines(keepends=True)
    (other / "trace.jsonl").write_bytes(b"".join(trace[:8]) + trace[8][:40])
    directory = RunDirectory(other)
    directory.hold()
    code, text = verify(runs, capsys, "alone", other)
    directory.close()
    assert code == 0 and text.startswith("identical up to step 7: weights_sha256 ")
    assert "averaged weights of step 6" in text and f"B: {other}, unfinished, on disk up to step 7" in text
    shutil.rmtree(other / "checkpoints")
    code, text = verify(runs, capsys, "alone", other)
    assert code == 0 and text.startswith("identical up to step 7: by their traces\n")


def damage_tensors(path):
    (path / "checkpoints" / "step-000000006.safetensors").write_bytes(b"short")


def damage_manifest(path):
    (path / "checkpoints" / "step-000000010.json").write_text("{")


def damage_trace(path):
    with (path / "trace.jsonl").open("a") as file:
        file.write("{torn\n")


def damage_identity(path):
    (path / "identity.json").write_text("[1")


def remove_steps(path):
    shutil.rmtree(path / "checkpoints")
    (path / "trace.jsonl").unlink()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (damage_tensors, "step-000000006.safetensors: damaged"),
        (damage_manifest, "step-000000010.json: cannot be read"),
        (damage_trace, "trace.jsonl line 12: damaged"),
        (damage_identity, "identity.json: cannot be read"),
        (remove_steps, "neither a checkpoint nor a trace"),
    ],
)
def test_what_cannot_be_read_is_one_line_and_exit_code_2(runs, copy, capsys, damage, words):
    other = copy("alone")
    damage(other)
    for flags in ((), ("--json",)):
        code = run(["verify", str(other), "alone", "--runs-dir", str(runs), *flags])
        out, err = capsys.readouterr()
        assert code == 2 and not out and words in err and err.count("\n") == 1


def test_a_run_that_does_not_exist_is_named(runs, capsys):
    assert verify(runs, capsys, "alone", "nothing") == (2, verify(runs, capsys, "nothing", "alone")[1])
