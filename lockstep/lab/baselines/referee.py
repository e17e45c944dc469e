"""Starts the contestants, each a process of its own on the cores that it may use, and collects outcomes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from lockstep.lab.baselines.baseline_task import BaselineTask
from lockstep.lab.baselines.contest import Outcome
from lockstep.native.c_library import find_compiler
from lockstep.native.nvrtc import NoCompiler

_PATIENCE_S = 1800.0
_END_S = 5.0
_ROOT = Path(__file__).parents[3]
_MPI = {"openmpi": "libmpi.so.40", "mpich": "libmpi.so.12"}  # beside Python, where `make` puts them


@dataclass(frozen=True)
class Entrant:
    """A contestant as it is known before it starts."""

    key: str  # for --only
    name: str
    module: str
    packages: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    by: str = "cores"  # what it computes with: one core, several cores, or the device of the task
    needs_gpu: bool = False


ENTRANTS = (
    Entrant("cpp", "sequential C++", "cpp_contestant", by="core"),
    Entrant("mpi", "MPI", "mpi_contestant", ("mpi4py",), by="cores"),
    Entrant("cuda", "CUDA by hand", "cuda_contestant", by="device", needs_gpu=True),
    Entrant("torch", "PyTorch", "torch_contestant", by="device"),
    Entrant("compiled", "PyTorch, compiled", "torch_contestant", (), ("compile",), by="device"),
    Entrant("tensorflow", "TensorFlow", "keras_contestant", ("tensorflow", "keras"), by="device"),
    Entrant("jax", "JAX", "jax_contestant", ("jax",), by="device"),
    Entrant("lightning", "Lightning", "lightning_contestant", ("lightning",), by="device"),
    Entrant("lockstep", "Lockstep", "lockstep_contestant", by="device"),
)
_ON_ONE_CORE_TOO = ("torch", "tensorflow", "jax", "lockstep")


@dataclass(frozen=True)
class Start:
    """A row of the table: who, with how many cores or processes."""

    entrant: Entrant
    cores: int
    name: str


def list_starts(device: str, cores: int, processes: int, only: tuple[str, ...] = ()) -> list[Start]:
    """All rows; on a CPU with several cores some run on one as well, beside the sequential program."""
    found = list[Start]()
    for entrant in ENTRANTS:
        if only and entrant.key not in only:
            continue
        if entrant.by == "core":
            found.append(Start(entrant, 1, f"{entrant.name}, 1 core"))
        elif entrant.by == "cores":
            used = min(cores, processes)
            found.append(Start(entrant, used, f"{entrant.name}, {processes} processes, {_cores(used)}"))
        elif device == "cuda":
            found.append(Start(entrant, cores, f"{entrant.name}, GPU"))
        else:
            several = sorted({1, cores} if entrant.key in _ON_ONE_CORE_TOO else {cores})
            found += [Start(entrant, number, f"{entrant.name}, {_cores(number)}") for number in several]
    return found


def find_obstacle(start: Start, task: BaselineTask, is_asked_for: bool) -> str:
    """Why it cannot start here; nothing if it can."""
    entrant = start.entrant
    if entrant.needs_gpu and task.device != "cuda":
        return "it needs a GPU"
    packages = (
        *entrant.packages,
        *(("triton",) if entrant.key == "compiled" and task.device == "cuda" else ()),
    )
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        return f"not installed: {' and '.join(missing)}"
    if entrant.key == "compiled" and task.device == "cpu" and not is_asked_for:
        return "compiling takes a minute on a slow CPU: ask for it by --only"
    if (entrant.key == "compiled" and task.device == "cpu") or entrant.key in ("cpp", "mpi"):
        try:
            find_compiler("c++")
        except NoCompiler as error:
            return str(error)
    if entrant.key == "mpi":
        return "" if _find_mpirun() else "there is no mpirun: install Open MPI or MPICH"
    return ""


def hold_race(start: Start, task: BaselineTask) -> Outcome | str:
    """Run one contestant to its end; its outcome, or in a line what went wrong."""
    outcome = Path(task.folder, "outcome.json")
    outcome.unlink(missing_ok=True)
    shutil.rmtree(Path(task.folder, "run"), ignore_errors=True)
    replace(task, cores=start.cores).write()
    words = ["-m", f"{__package__}.{start.entrant.module}", task.folder, str(time.time())]
    command, env = [sys.executable, *words, *start.entrant.arguments], _environment(start, task)
    if start.entrant.key == "mpi":
        command, env = _under_mpirun(command, task.processes, env)
    with _on_cores(start.cores):
        process = subprocess.Popen(
            command,
            env=env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    try:
        _, errors = process.communicate(timeout=_PATIENCE_S)
    except subprocess.TimeoutExpired:
        return f"stopped after {_PATIENCE_S:.0f} s"
    finally:
        _end(process)
    if process.returncode or not outcome.exists():
        return _last_words(errors)
    return Outcome(**json.loads(outcome.read_text()))


def _end(process: subprocess.Popen[str]) -> None:
    """With all that it started; mpirun, which has files of its own to remove, is asked first."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _last_words(errors: str) -> str:
    """The line that names the last exception; under mpirun there are others after it."""
    lines = [line for line in errors.splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"[A-Za-z_][\w.]*: \S", line)]
    return re.sub(r"^(\w+\.)+", "", (named or lines or ["it failed"])[-1].strip())


def _environment(start: Start, task: BaselineTask) -> dict[str, str]:
    cores, paths = str(start.cores), (str(_ROOT), os.environ.get("PYTHONPATH", ""))
    found = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "TF_CPP_MIN_LOG_LEVEL": "3"}
    found |= {f"{name}_NUM_THREADS": cores for name in ("OMP", "MKL", "OPENBLAS")}
    if start.entrant.key == "mpi":
        found["OMP_NUM_THREADS"] = "1"
    if task.device == "cpu":
        found |= {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}
    return found


@contextmanager
def _on_cores(count: int) -> Iterator[None]:
    """What is started here may use so many cores, and cannot use more."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:count])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _find_mpirun() -> Path | None:
    if found := shutil.which("mpirun"):
        return Path(found)
    beside = (Path(sys.prefix, name, "bin", "mpirun") for name in _MPI)
    return next((path for path in beside if path.is_file()), None)


def _under_mpirun(words: list[str], processes: int, env: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    mpirun = _find_mpirun()
    assert mpirun
    told = subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=False).stdout
    flags = list[str]()
    if "Open MPI" in told:
        flags = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
    library = mpirun.parents[1] / "lib" / _MPI.get(mpirun.parents[1].name, "")
    if library.is_file():
        env = {**env, "MPI4PY_LIBMPI": str(library)}
    return [str(mpirun), *flags, "-n", str(processes), *words], env


def _cores(count: int) -> str:
    return f"{count} core" + "s" * (count > 1)
