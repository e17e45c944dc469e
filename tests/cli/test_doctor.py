"""`lockstep doctor --comm` as people start it: real processes, which it never leaves behind."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from pathlib import Path

import pytest
from patience import PATIENCE_S
from small import call, command
from world import MPI, PREFIX, has_mpi, launched

from lockstep.cli import doctor_comm as comm
from lockstep.cli.doctor_comm import COLUMNS
from lockstep.comm.self_test import OPERATIONS

ALL_OK = dict.fromkeys(OPERATIONS, "ok")


@pytest.fixture
def env():
    """An environment without MPI and GPU, by which the processes that inherit it are found again."""
    mark = uuid.uuid4().hex
    yield {**os.environ, "PATH": "", "CUDA_VISIBLE_DEVICES": "", "LOCKSTEP_TEST_MARK": mark}
    deadline = time.monotonic() + 15  # a worker that is forgotten would check for longer
    while (left := processes(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, f"left running: {left}"


def processes(*words):
    """The processes in whose environment all the words are."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            text = path.read_text(errors="replace")
        except OSError:
            continue
        if all(word in text for word in words):
            found.append(int(path.parent.name))
    return found


def with_mpi(env, name):
    """The environment, with one of the MPIs on its path."""
    prefix = PREFIX / name
    return {
        **env,
        "PATH": f"{prefix / 'bin'}:/usr/bin:/bin",
        "MPI4PY_LIBMPI": str(prefix / "lib" / MPI[name]),
    }


def wait_for_worker(env, rank):
    """The process of a worker, as soon as there is one."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        for pid in processes(env["LOCKSTEP_TEST_MARK"]):
            with suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text() == f"lockstep {rank}\n":
                    return pid
        time.sleep(0.01)
    raise AssertionError("no worker was started")


def start(arguments, env):
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


@pytest.mark.gloo
def test_the_table(env):
    done = call(command("doctor", "--comm"), env=env)
    assert done.returncode == 0, done.stderr
    head, *rows = done.stdout.splitlines()
    assert head.split() == " ".join(COLUMNS).replace("-", " ").split()
    table = {row[:19].strip(): row[19:].split() for row in rows[: len(OPERATIONS)]}
    assert list(table) == list(OPERATIONS)
    assert all(cells[0] == "ok" and len(cells) == len(COLUMNS) for cells in table.values())
    reasons = rows[len(OPERATIONS) :]
    assert any(line.startswith("mpi cpu: not tried: ") for line in reasons)
    assert not any(line.startswith("gloo cpu") for line in reasons)


@pytest.mark.mpi
@pytest.mark.parametrize("name", MPI)
def test_mpi(name, env):
    if not has_mpi(name):
        pytest.skip(f"no {name} in this environment")
    done = call(command("doctor", "--comm", "mpi-cpu", "--json"), env=with_mpi(env, name))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"mpi-cpu": {"workers": 2, "operations": ALL_OK, "reason": ""}}


@pytest.mark.mpi
@pytest.mark.skipif(not (has_mpi("openmpi") and has_mpi("mpich")), reason="needs two MPIs")
def test_an_mpi_that_is_not_the_mpiruns_is_reported(env, monkeypatch):
    wrong = {**with_mpi(env, "mpich"), "MPI4PY_LIBMPI": with_mpi(env, "openmpi")["MPI4PY_LIBMPI"]}
    for name in ("PATH", "MPI4PY_LIBMPI", "CUDA_VISIBLE_DEVICES", "LOCKSTEP_TEST_MARK"):
        monkeypatch.setenv(name, wrong[name])
    report = comm._try("mpi-cpu")
    assert report.failed and "mpi4py sees 1: it uses Open MPI" in report.reason


@pytest.mark.gloo
def test_under_torchrun(env):
    arguments, _ = launched("torchrun", 2, command("doctor", "--comm", "--json"))
    done = call(arguments, env={**env, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["gloo-cpu"] == {"workers": 2, "operations": ALL_OK, "reason": ""}


@pytest.mark.gloo
def test_a_worker_that_dies_is_reported(env):
    for _ in range(4):
        doctor = start(command("doctor", "--comm", "--json"), env)
        with suppress(ProcessLookupError):
            os.kill(wait_for_worker(env, rank=1), signal.SIGKILL)
        output, _ = doctor.communicate(timeout=PATIENCE_S)
        if doctor.returncode:  # else the worker was done before it was killed, and shows nothing
            break
    found = json.loads(output)
    assert doctor.returncode == 1 and set(found) == set(COLUMNS)
    assert found["gloo-cpu"]["reason"].startswith(
        "worker 1 was killed by SIGKILL (all of it: lockstep doctor"
    )


@pytest.mark.gloo
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_doctor_that_is_stopped_ends_its_workers(number, env):
    for _ in range(4):
        doctor = start(command("doctor", "--comm"), env)
        with suppress(ProcessLookupError):
            worker = wait_for_worker(env, rank=1)
            os.kill(worker, signal.SIGSTOP)  # so that the others cannot be done first
            doctor.send_signal(number)
            os.kill(worker, signal.SIGCONT)
        doctor.communicate(timeout=PATIENCE_S)
        if doctor.returncode:  # else it was done before the signal came, and shows nothing
            break
    assert doctor.returncode == 128 + number


@pytest.mark.gloo
@pytest.mark.parametrize(("where", "limits_s"), [("joining", [1]), ("reduce", [3, 15])])
def test_a_group_that_hangs_is_ended(where, limits_s, env, tmp_path):
    for limit_s in limits_s:
        start_s = time.monotonic()
        done = call([sys.executable, str(hanging_script(tmp_path, where, limit_s))], env=env)
        assert done.returncode == 1 and time.monotonic() - start_s < 40
        report = json.loads(done.stdout)["gloo-cpu"]
        if report["reason"].startswith(where):  # else the machine is too busy to come so far within the limit
            break
    assert report["reason"] == f"{where} did not end in {limit_s} s"
    before = [] if where == "joining" else list(OPERATIONS)[:4]
    assert report["operations"] == dict.fromkeys(before, "ok")


def hanging_script(folder, where, limit_s):
    """A doctor whose workers, which are copies of the script, wait less than they would."""
    script = folder / "hang.py"
    script.write_text(f"""
import os, time
from lockstep.cli import doctor_comm as comm, main
comm._CHECK_S, comm._TELL_S = {limit_s}, 1.0
if '"rank": 1,' in os.environ.get("LOCKSTEP_WORLD", ""):
    from lockstep.comm import self_test as check
    from lockstep.elastic import worker_groups
    hang = lambda *arguments: time.sleep(60)
    if {where!r} == "joining":
        worker_groups.WorkerGroups.next = hang
    check.OPERATIONS["reduce"] = hang
main.main(["doctor", "--comm", "gloo-cpu", "--json"])
""")
    return script


def test_a_column_that_cannot_be_tried_says_what_is_missing(env):
    done = call(command("doctor", "--comm", "mpi-cpu"), env=env)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("lockstep: --comm mpi-cpu: ") and len(done.stderr.splitlines()) == 1
