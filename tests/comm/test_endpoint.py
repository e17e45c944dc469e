"""How workers find each other, and the one line when they do not."""

import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import forked
import pytest
from small import OVERRIDES, call, train_command
from world import has_mpi, launched

from lockstep.comm.endpoint import listen, own_address_towards
from lockstep.errors import SpecError
from lockstep.spec.world import World

pytestmark = pytest.mark.gloo


def torchrun_world(rank, size, port, address="127.0.0.1"):
    """The environment of a worker, as torchrun without an agent's store sets it."""
    world = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
    names = {**world, "MASTER_ADDR": address, "MASTER_PORT": port}
    return {**os.environ, **{name: str(value) for name, value in names.items()}}


def test_a_port_in_use_is_named(tmp_path):
    with listen("127.0.0.1") as taken:
        port = taken.getsockname()[1]
        done = forked.call(train_command(tmp_path), env=torchrun_world(0, 2, port))
    assert done.returncode == 2
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in done.stderr
    assert len(done.stderr.splitlines()) == 1 and not list(tmp_path.iterdir())


def test_what_listens_there_is_no_worker(tmp_path):
    """A web server, say: it accepts and never speaks our language."""
    with listen("127.0.0.1") as foreign:
        start = time.monotonic()
        done = forked.call(train_command(tmp_path), env=torchrun_world(1, 2, foreign.getsockname()[1]))
    assert done.returncode == 1 and "is the port in use by something else?" in done.stderr
    assert time.monotonic() - start < 30 and len(done.stderr.splitlines()) == 1


def test_an_unknown_host_is_named(tmp_path):
    done = forked.call(train_command(tmp_path), env=torchrun_world(1, 2, 29511, "no-such-host.invalid"))
    assert done.returncode == 1 and "'no-such-host.invalid', is unknown" in done.stderr


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2"}, "MASTER_ADDR and MASTER_PORT not"),
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}, "worker 2 of 2"),
        ({"RANK": "x", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}, "RANK='x'"),
        (
            {"RANK": "0", "WORLD_SIZE": "8", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
            "8 workers are more",
        ),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "-2"}, "OMPI_COMM_WORLD_SIZE='-2'"),
    ],
)
def test_a_wrong_environment_is_explained(environment, message, tmp_path):
    done = call(train_command(tmp_path), env={**os.environ, **environment})
    assert done.returncode == 2 and message in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.mpi
@pytest.mark.skipif(not has_mpi("mpich"), reason="MPICH is not installed beside this Python")
def test_mpirun_without_mpi4py_names_the_fix(tmp_path):
    (tmp_path / "mpi4py.py").write_text("raise ImportError(\"No module named 'mpi4py'\")")
    command, env = launched("mpich", 2, train_command(tmp_path / "runs"))
    done = call(command, env={**env, "PYTHONPATH": str(tmp_path)})
    assert done.returncode != 0 and "pip install 'lockstep-train[mpi]'" in done.stderr


@pytest.mark.mpi
@pytest.mark.skipif(not (has_mpi("mpich") and has_mpi("openmpi")), reason="needs both MPIs")
def test_an_mpirun_of_another_mpi_is_found_out(tmp_path):
    command, _ = launched("mpich", 2, train_command(tmp_path / "runs"))
    _, env = launched("openmpi", 2, ["python"])
    command = [word for word in command if word not in ("-W", "error")]  # mpi4py warns of the same
    done = call(command, env=env)
    assert done.returncode != 0 and "mpirun started 2 workers, but mpi4py sees 1" in done.stderr


def test_a_listener_binds_one_address_only():
    with listen("127.0.0.1") as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
        with pytest.raises(SpecError, match="cannot listen on"):
            listen("127.0.0.1", listener.getsockname()[1])


def test_the_own_address_towards_loopback_is_loopback():
    assert own_address_towards("127.0.0.1") == "127.0.0.1"


def test_the_store_of_our_launcher_listens_on_loopback_alone(tmp_path):
    """Worker 0 of a waiting pair: no socket of its process listens on any other address."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        fd, port = listener.fileno(), listener.getsockname()[1]
        world = World("lockstep", 0, 2, 0, 2, "127.0.0.1", port, fd, parent=os.getpid()).dump()
        keys = [part for item in OVERRIDES for part in ("-o", item)]
        command = [
            sys.executable,
            "-m",
            "lockstep",
            "train",
            "--runs-dir",
            str(tmp_path),
            "--device",
            "cpu",
            *keys,
        ]
        with subprocess.Popen(command, env={**os.environ, "LOCKSTEP_WORLD": world}, pass_fds=(fd,)) as worker:
            try:
                found = wait_for_listeners(worker.pid, 2)
            finally:
                worker.kill()
    assert found and set(found) == {"0100007F"}


def wait_for_listeners(pid, count):
    """The addresses (as the kernel writes them) that a process listens on, once there are so many."""
    deadline = time.monotonic() + 30
    found = []
    while len(found) < count and time.monotonic() < deadline:
        time.sleep(0.2)
        inodes = set()
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                inodes.add(str(link.readlink()).removeprefix("socket:[").removesuffix("]"))
        found = []
        for table in ("tcp", "tcp6"):
            rows = [line.split() for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]]
            found += [row[1].partition(":")[0] for row in rows if row[3] == "0A" and row[9] in inodes]
    return found
