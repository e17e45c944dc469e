"""`lockstep train` as a person types it: bad input, printing, signals of trouble."""

import os
import tomllib
from pathlib import Path

import forked
import pytest
import torch
from small import OVERRIDES, call, command, small_run, summary, train_command

import lockstep
from lockstep.cli.main import run
from lockstep.recipes import RECIPES


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_print_config_round_trips(name, capsys, tmp_path):
    if name == "finetune":
        pytest.importorskip("timm", reason="its weights and their sizes come from timm")
    assert run(["train", name, "--print-config"]) == 0
    text = capsys.readouterr().out
    path = tmp_path / "run.toml"
    path.write_text(text)
    assert run(["train", "-c", str(path), "--print-config"]) == 0
    assert capsys.readouterr().out == text


def test_layers_recipe_then_file_then_overrides(capsys, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("seed = 3\n[train]\nbatch = 64\nepochs = 9\n")
    assert run(["train", "mnist", "-c", str(path), "-o", "train.epochs=2", "--print-config"]) == 0
    table = tomllib.loads(capsys.readouterr().out)
    assert (table["data"]["name"], table["seed"]) == ("mnist", 3)
    assert (table["train"]["batch"], table["train"]["epochs"]) == (64, 2)


BAD = {
    "unknown recipe": (["shapez"], "did you mean 'shapes'?"),
    "unknown model": (["-o", "model.name=lenet"], "unknown model 'lenet': did you mean 'lenet5'?"),
    "unknown key": (["-o", "optimizer.lrr=1"], "did you mean 'lr'?"),
    "unknown section": (["-o", "optimiser.lr=1"], "did you mean 'optimizer'?"),
    "unknown model key": (["-o", "model.droput=1"], "model.droput"),
    "unknown data set": (["-o", "data.name=shape"], "did you mean 'shapes'?"),
    "unknown data key": (["-o", "data.sise=1"], "data.sise"),
    "wrong type": (["-o", "train.epochs=many"], "train.epochs='many' must be a whole number"),
    "not divisible": (["-o", "train.batch=100"], "not divisible by train.lanes=8"),
    "no power of two": (["-o", "train.lanes=12"], "must be a power of two: use 8 or 16"),
    "missing data": (["fashion", "-o", "data.dir=nowhere"], "nowhere"),
    "missing file": (["-c", "nowhere.toml"], "nowhere.toml: cannot read the file"),
    "missing weights": (["-o", "model.weights=nowhere.safetensors"], "nowhere.safetensors"),
    "missing run": (["--resume", "nowhere"], "no run 'nowhere'"),
    "missing fork": (["--fork", "nowhere"], "no run 'nowhere'"),
    "both": (["--resume", "a", "--fork", "b"], "exclude each other"),
    "bad name": (["--name", "a/b"], "must be the name of a folder"),
    "image too small": (["-o", "data.size=9"], "lenet5"),
    "no gpu": (["--device", "cuda"], "torch sees no GPU"),
    "batch too large": (["-o", "train.batch=131072"], "lower train.batch"),
    "timm": (["-o", "model.name=timm:resnet18"], "lockstep-train[timm]"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_exit_2_before_any_work(case, tmp_path, monkeypatch, capsys):
    import importlib.util

    import torch

    if (case == "no gpu" and torch.cuda.is_available()) or (
        case == "timm" and importlib.util.find_spec("timm")
    ):
        pytest.skip("this machine has it")
    monkeypatch.chdir(tmp_path)
    arguments, message = BAD[case]
    assert run(["train", "--device", "cpu", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.startswith("lockstep: ")
    assert len(captured.err.splitlines()) == 1
    assert not list(tmp_path.iterdir()), "nothing may be written"


IN_FILE = {
    "value": ("[train]\nepochs = 0", [], True),
    "type": ("[train]\nepochs = true", [], True),
    "top": ("seed = -1", [], True),
    "key": ("[optimizer]\nlrr = 1", [], True),
    "section": ("[optimiser]\nlr = 1", [], True),
    "top key": ("epochs = 3", [], True),
    "name": ('[optimizer]\nname = "adm"', [], True),
    "model": ('[model]\nname = "lenet"', [], True),
    "model's own key": ("[model]\ndroput = 0.1", [], True),
    "data's own value": ("[data]\nsize = 2", [], True),
    "two keys": ("[train]\nbatch = 100", [], True),
    "overridden": ("[train]\nepochs = 3", ["-o", "train.epochs=0"], False),
    "another key": ("[optimizer]\nlr = 0.1", ["-o", "optimizer.lrr=0"], False),
    "another section": ("[train]\nepochs = 3", ["-o", "optimizer.lr=0"], False),
}


@pytest.mark.parametrize("case", IN_FILE)
def test_an_error_of_a_file_names_it(case, tmp_path, monkeypatch, capsys):
    text, arguments, is_named = IN_FILE[case]
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text(text)
    assert run(["train", "--device", "cpu", "-c", "mine.toml", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("lockstep: mine.toml: ") == is_named and len(error.splitlines()) == 1, error
    assert [path.name for path in tmp_path.iterdir()] == ["mine.toml"]


def test_a_recipe_runs_as_a_process_and_prints_plain_lines(tmp_path):
    done = call(train_command(tmp_path, "--track", "tensorboard"))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    cores = len(os.sched_getaffinity(0))
    hint = [f"1 of {cores} cores is used: --workers auto uses more, with the same bits"] if cores > 1 else []
    assert lines[0].startswith("lenet5 (") and lines[2:-5] == [*hint, f"run {tmp_path / 'run'}"]
    assert lines[-5].startswith("epoch 1/2  train loss")
    assert f"weights_sha256 {summary(tmp_path / 'run')['weights_sha256']}" in lines
    assert "\x1b" not in done.stdout and done.stderr == ""
    assert list((tmp_path / "run" / "tensorboard").iterdir())


def test_a_quiet_run_tells_only_warnings(tmp_path, capfd):
    keys = [part for key in (*OVERRIDES, "train.batch=200", "train.epochs=1") for part in ("-o", key)]
    place = ["--runs-dir", str(tmp_path), "--device", "cpu"]
    assert run(["train", "--quiet", *place, *keys]) == 0
    out, err = capfd.readouterr()
    assert out == "" and err.startswith("lockstep: warning: every epoch leaves out 130 of 330 images")
    assert (tmp_path / "shapes" / "summary.json").exists()
    events = []
    launch = lockstep.Launch(runs_dir=tmp_path, device="cpu", quiet=True)
    lockstep.train(small_run("train.epochs=1"), launch=launch, on_event=events.append)
    assert len(events) > 10 and capfd.readouterr() == ("", "")


def test_a_terminal_gets_a_bar(tmp_path):
    parent, child = os.openpty()
    arguments = train_command(tmp_path, overrides=("train.epochs=6",))
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    with forked.Forked(arguments, env=environment, terminal=os.ttyname(child), draws=True) as process:
        shown = os.read(parent, 4096)  # it has opened the terminal
        os.close(child)
        try:
            while block := os.read(parent, 4096):
                shown += block
        except OSError:  # the other end is closed
            pass
        os.close(parent)
        assert process.finish().returncode == 0
    text = shown.decode()
    assert "━" in text and "img/s" in text and "left" in text and "loss" in text


def test_a_full_disk_warns_loudly_training_goes_on_and_the_end_is_no_success(tmp_path):
    """A real file system of 1 MiB, in a mount namespace of its own."""
    script = f"mount -t tmpfs -o size=700k tmpfs {tmp_path} && exec " + " ".join(
        train_command(tmp_path, overrides=("model.name=emotion48", "train.epochs=1"))
    )
    probe = call(["unshare", "-m", "true"]) if Path("/usr/bin/unshare").exists() else None
    if probe is None or probe.returncode:
        pytest.skip("cannot make a mount namespace here")
    done = call(["unshare", "-m", "sh", "-c", script])
    assert "NOT saved: No space left on device" in done.stdout
    assert "epoch 1/1" in done.stdout and "Traceback" not in done.stderr
    assert done.returncode == 1
    told = "the run is trained, but its checkpoint of step 10 could NOT be written: free space on"
    assert told in done.stderr and f"go on with `lockstep train --resume {tmp_path / 'run'} " in done.stderr


def test_help_teaches():
    done = call(command("train", "--help"))
    assert done.returncode == 0 and "recipes:" in done.stdout and "cifar10" in done.stdout
    assert call(command()).returncode == 2


def test_a_scripts_run_is_not_forked_without_its_script(tmp_path):
    """Its run.toml names neither its data nor its module."""
    images = torch.zeros(16, 1, 20, 20, dtype=torch.uint8)
    data = torch.utils.data.TensorDataset(images, torch.arange(16) % 2)
    launch = lockstep.Launch("own", runs_dir=tmp_path, device="cpu")
    keys = lockstep.Run(train=lockstep.Train(epochs=1, batch=8, lanes=1))
    lockstep.train(keys, data=(data, data), launch=launch, on_event=lambda event: None)
    done = forked.call(command("train", "--fork", "own", "--runs-dir", str(tmp_path), "--device", "cpu"))
    assert done.returncode == 2 and "by a script" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["own"]


def test_a_run_in_parts_has_the_bits_of_one_that_never_stopped(tmp_path, by_one_worker, capsys):
    keys = [part for item in OVERRIDES for part in ("-o", item)]
    start = ["train", "--runs-dir", str(tmp_path), "--device", "cpu", "--quiet", *keys]
    go_on = [*start, "--resume", str(tmp_path / "run")]
    assert run([*start, "--name", "run", "--stop-after-epochs", "1"]) == 0
    assert "1 after epoch 1 of 2; the state is saved: go on with" in capsys.readouterr().err
    assert run([*go_on, "--stop-after-epochs", "1"]) == 0, "there is nothing left to do"
    assert not (tmp_path / "run/summary.json").exists()
    assert run([*go_on, "--stop-after-epochs", "2"]) == 0
    assert summary(tmp_path / "run")["weights_sha256"] == by_one_worker()["weights_sha256"]
    assert run([*start, "--name", "run", "--stop-after-epochs", "-1"]) == 2
