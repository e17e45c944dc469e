"""How workers find each other, and the one line when they do not."""

import os
import time

import forked
import pytest
from small import call, train_command
from world import has_mpi, launched

from lockstep.comm.rendezvous import listen, own_address_towards
from lockstep.errors import SpecError

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
