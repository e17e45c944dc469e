"""`lockstep completion`: what shells offer, asked of the parser, and of real shells where there are any."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from small import small_run

from lockstep.cli.main import make_parser, run
from lockstep.cli.shell.candidates import find_candidates
from lockstep.runs.directory import RunDirectory


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """A folder with the runs `one` and `two`, and something else."""
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two"):
        RunDirectory.create(tmp_path / "runs", name).describe(small_run(), {"seed": 0})
    (tmp_path / "runs" / "else").mkdir()
    (tmp_path / "there").mkdir()
    return tmp_path


OFFERED = {
    "": {"train", "runs", "completion", "sweep"},
    "--v": {"--version"},
    "train ": {"shapes", "cifar10"},
    "train sh": {"shapes"},
    "train --tra": {"--trace", "--track"},
    "train --track ": {"tensorboard", "wandb", "mlflow"},
    "train --track wandb --tra": {"--trace", "--track"},
    "train --trace --tra": {"--track"},
    "train --name new --device c": {"cpu", "cuda"},
    "train -o optimizer.l": {"optimizer.lr="},
    "train shapes -o seed=1 --resume ": {"auto", "one", "two"},
    "train shapes nothing": set(),
    "runs ": {"list", "compare", "prune"},
    "runs compare one ": {"one", "two"},
    "runs compare one --runs-dir there ": set(),
    "runs compare --runs-dir=there ": set(),
    "verify one t": {"two"},
    "eval --checkpoint ": {"last", "best"},
    "data show fas": {"fashion"},
    "nothing ": set(),
    "train -c ": set(),  # the shell offers files
}


@pytest.mark.parametrize("typed", OFFERED)
def test_what_is_offered(typed, runs):
    found = set(find_candidates(make_parser(), typed.split(" ")))
    assert found >= OFFERED[typed] and (typed == "" or len(typed.split()) < 2 or found == OFFERED[typed]), (
        found
    )


def test_every_verb_offers_all_its_flags():
    parser = make_parser()
    for verb in find_candidates(parser, [""]):
        assert "--help" in find_candidates(parser, [verb, "--"]), verb


@pytest.fixture
def typed_in(runs, monkeypatch):
    """Calls a shell's script with `lockstep` on the path."""
    program = runs / "bin" / "lockstep"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m lockstep "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))

    def call(shell, *code):
        if not shutil.which(shell):
            pytest.skip(f"{shell} is not installed")
        command = [shell, *(["--norc"] if shell == "bash" else []), "-c", "\n".join(code)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stderr == ""
        return done.stdout.splitlines()

    return call


def test_bash_completes(typed_in):
    def typed(*words):
        quoted = " ".join(f"'{word}'" for word in words)
        return (
            f"COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _lockstep lockstep; echo ${{COMPREPLY[@]}}"
        )

    lines = typed_in(
        "bash",
        "compopt() { echo told: $@; }  # it works only while a key is pressed",
        "source <(lockstep completion bash)",
        "complete -p lockstep",
        typed("lockstep", "train", "--track", ""),
        typed("lockstep", "runs", "compare", "one", "t"),
        typed("lockstep", "train", "-o", "train.epo"),
        typed("lockstep", "train", "-o", "optimizer.lr", "=", "0.1", "--rdzv", "h", ":", "1", "sh"),
        typed("lockstep", "train", "--device", "=", "c"),
        typed("lockstep", "predict", "one", ""),
    )
    assert lines[0] == "complete -o default -F _lockstep lockstep"
    assert lines[1:] == [
        "mlflow tensorboard wandb",
        "two",
        "told: -o nospace",
        "train.epochs=",
        "shapes",
        "",
        "",
    ]


def test_zsh_completes(typed_in):
    lines = typed_in(
        "zsh",
        'compdef() { echo told: $@ }; compadd() { echo offered: "$@" }; _files() { echo files }',
        "source <(lockstep completion zsh)",
        *(
            f"words=(lockstep {words}); CURRENT=$#words; _lockstep"
            for words in ("train --tra", "runs compare ''")
        ),
        "words=(lockstep train -o train.epo); CURRENT=4; _lockstep",
        "words=(lockstep predict one ''); CURRENT=4; _lockstep",
    )
    offered = ["-- --trace --track", "-- one two", "-S  -- train.epochs="]
    assert lines == ["told: _lockstep lockstep", *(f"offered: {words}" for words in offered), "files"]


def test_fish_completes(typed_in):
    lines = typed_in("fish", "lockstep completion fish | source", "complete -C 'lockstep train --tra'")
    assert lines == ["--trace", "--track"]


def test_an_unknown_shell_is_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        run(["completion", "csh"])
    assert "invalid choice: 'csh'" in capsys.readouterr().err
