"""`lockstep bench baselines`: the C++ network against float64, equal starts, what is missing, bad input."""

import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from lockstep.cli.lab.baseline_files import write_files
from lockstep.cli.lab.baseline_table import find_strays
from lockstep.cli.main import run
from lockstep.lab.baselines import referee
from lockstep.lab.baselines.baseline_task import BaselineTask
from lockstep.lab.baselines.contest import Outcome
from lockstep.lab.baselines.cpp_network import CppNetwork, build_network, measure_limit
from lockstep.lab.baselines.referee import find_obstacle, hold_race, list_starts
from lockstep.lab.baselines.torch_network import make_network

needs_compiler = pytest.mark.skipif(not shutil.which("c++"), reason="no compiler")
SMALL = ["--device", "cpu", "--images", "16", "--batch", "8", "--epochs", "1", "--processes", "2"]


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("task"))
    found = BaselineTask(folder, 16, 4, 8, 1, 0.1, 0, "cpu", "fp32", cores=1, processes=2, lanes=2)
    write_files(found)
    return found


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return build_network(tmp_path_factory.mktemp("library") / "network.so")


@needs_compiler
@pytest.mark.parametrize("batch", [1, 5, 13])
def test_a_step_in_cpp_is_that_of_autograd_in_float64(task, library, batch):
    own, exact = CppNetwork(library, task.channels_last_weights()), make_network(task).double()
    images, labels = torch.randn(batch, 1, 48, 48), torch.randint(0, 7, (batch,))
    loss = cross_entropy(exact(images.double()), labels)
    loss.backward()
    assert own.find_gradient(images.numpy(), labels.numpy(), 1 / batch) / batch == pytest.approx(
        loss.item(), 1e-6
    )
    before, at = own.weights.copy(), 0
    for parameter, weight in zip(exact.parameters(), task.channels_last_weights(), strict=True):
        grad = parameter.grad.numpy()
        if grad.ndim == 2 and grad.shape[1] == 4608:
            grad = grad.reshape(256, 128, 6, 6).transpose(2, 3, 1, 0)
        elif grad.ndim > 1:
            grad = grad.T if grad.ndim == 2 else grad.transpose(2, 3, 1, 0)
        found = own.gradient[at : at + weight.size]
        assert np.abs(found - grad.ravel()).max() <= 2e-5 * np.abs(grad).max()
        at += weight.size
    assert np.allclose(own.predict(images.numpy()), exact(images.double()).detach().numpy(), atol=1e-5)
    own.descend(0.5)
    assert np.allclose(own.weights, before - 0.5 * own.gradient, atol=1e-7)


@needs_compiler
def test_what_the_compiler_can_do_is_measured():
    assert 1e8 < measure_limit(1) < 1e12


@needs_compiler
def test_all_start_with_the_same_loss_and_end_alike(task):
    """Sequential, two processes of MPI, PyTorch and Lockstep, each a process of its own."""
    found = {
        start.name: hold_race(start, task)
        for start in list_starts("cpu", 2, 2, ("cpp", "mpi", "torch", "lockstep"))
        if start.cores == (2 if start.entrant.key == "mpi" else 1)
        if not find_obstacle(start, task, is_asked_for=True)
    }
    assert len(found) >= 3 and all(isinstance(each, Outcome) for each in found.values()), found
    assert not find_strays(found)
    first = found["sequential C++, 1 core"]
    for name, each in found.items():
        assert each.last_loss == pytest.approx(first.last_loss, rel=1e-5), name
        assert each.accuracy == first.accuracy and each.train_s > 0 and each.startup_s > 0
    assert first.infer_one_s > 0 and first.infer_batch_s > 0


def test_who_starts_otherwise_is_told():
    one = Outcome("fp32", 1.0, 1.0, 2.0, 1.0, 0.5)
    assert not find_strays(
        {"a": one, "b": replace(one, first_loss=2.0001), "c": replace(one, precision="bf16")}
    )
    lines = find_strays(
        {"a": one, "b": replace(one, first_loss=2.001), "c": replace(one, first_loss=float("nan"))}
    )
    assert [line.split()[0] for line in lines] == ["b", "c"] and "others in fp32 with 2.000000" in lines[0]


def test_like_is_compared_with_like():
    names = [start.name for start in list_starts("cpu", 4, 4)]
    assert names.index("Lockstep, 1 core") == names.index("Lockstep, 4 cores") - 1
    assert "sequential C++, 1 core" in names and "MPI, 4 processes, 4 cores" in names
    assert all(name.startswith(("sequential", "MPI")) or "GPU" in name for name in
               (start.name for start in list_starts("cuda", 4, 4)))  # fmt: skip


@needs_compiler
def test_table_picture_and_records(tmp_path, capsys):
    picture = tmp_path / "baselines.png"
    assert run(["bench", "baselines", *SMALL, "--only", "cpp", "--picture", str(picture)]) == 0
    out, err = capsys.readouterr()
    assert "sequential C++, 1 core" in out and "x the least time" in out and "all start with the loss" in out
    assert picture.read_bytes()[:4] == b"\x89PNG" and "drew" in err
    assert run(["bench", "baselines", *SMALL, "--only", "cpp", "--json"]) == 0
    (record,) = json.loads(capsys.readouterr().out)
    assert record["unit"] == "s" and record["value"] > 0 and record["details"]["limit_gflop_s"] > 0
    assert record["details"]["batch"] == 8 and record["details"]["precision"] == "fp32"


def test_what_is_missing_is_said_and_the_bench_ends(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(referee, "find_spec", lambda name: None)
    only = "cpp,mpi,cuda,compiled,tensorflow,jax,lightning"
    assert run(["bench", "baselines", *SMALL, "--cores", "1", "--only", only]) == 0
    out, err = capsys.readouterr()
    for line in (
        "left out: sequential C++, 1 core: there is no C++ compiler: install g++",
        "left out: MPI, 2 processes, 1 core: not installed: mpi4py",
        "left out: CUDA by hand, 1 core: it needs a GPU",
        "left out: TensorFlow, 1 core: not installed: tensorflow and keras",
        "left out: JAX, 1 core: not installed: jax",
        "left out: Lightning, 1 core: not installed: lightning",
    ):
        assert line in err
    assert "none of the contestants could start" in out


@needs_compiler
def test_a_bench_that_is_ended_leaves_nothing(tmp_path):
    command = [sys.executable, "-m", "lockstep", "bench", "baselines", "--device", "cpu", "--only", "cpp"]
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    bench = subprocess.Popen([*command, "--images", "1024", "--epochs", "1000"], env=env)
    while not (started := list(tmp_path.glob("lockstep-baselines-*/network.so"))):
        assert bench.poll() is None
        time.sleep(0.05)
    bench.terminate()
    assert bench.wait() == 143 and not started[0].parent.exists()
    for words in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            assert str(tmp_path).encode() not in words.read_bytes()


def test_the_number_of_processes_matters_to_mpi_alone(capsys):
    words = ["bench", "baselines", *SMALL, "--processes", "3", "--only"]
    assert run([*words, "mpi"]) == 2
    assert run([*words, "cuda"]) == 0
    assert "it needs a GPU" in capsys.readouterr().err


def test_a_contestant_that_fails_is_said(task, monkeypatch):
    (start,) = list_starts("cpu", 1, 2, ("cpp",))
    monkeypatch.setenv("CXX", "false")
    assert hold_race(start, task).startswith("CompileFailed: ")
    (start,) = list_starts("cpu", 1, 2, ("lockstep",))
    assert "lanes=3 must be a power of two" in hold_race(start, replace(task, lanes=3))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--images", "0"], "--images 0 must be from 1"),
        (["--epochs", "-1"], "--epochs -1 must be"),
        (["--batch", "32"], "--batch 32 is more than --images 16"),
        (["--processes", "3"], "--processes 3 must be from 1 to 64 and divide --batch 8"),
        (["--cores", "9999"], "--cores 9999: this machine"),
        (["--cores", "0"], "--cores 0: this machine"),
        (["--rate", "0"], "--rate 0.0 must be above 0"),
        (["--rate", "nan"], "--rate nan must be above 0, and finite"),
        (["--rate", "inf"], "--rate inf must be above 0, and finite"),
        (["--seed", "-1"], "--seed -1 must be"),
        (["--only", "cpp,fortran"], "--only fortran: there is no such contestant; there are cpp, mpi"),
        (["--only", "cpp,"], "--only : there is no such contestant"),
        (["--precision", "bf16"], "--precision bf16 needs a GPU"),
        (["--picture", "no/where.png"], "no/where.png"),
    ],
)
def test_bad_input_is_one_line(words, says, capsys):
    assert run(["bench", "baselines", *SMALL, *words]) == 2
    assert says in capsys.readouterr().err.strip().splitlines()[-1]
