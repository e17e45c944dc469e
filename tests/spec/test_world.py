"""What the environment says about workers."""

import pytest

from lockstep.errors import SpecError
from lockstep.spec import Launch, Run, Train
from lockstep.spec.world import VARIABLE, World, read_world

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
MASTER = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


def test_no_launcher_no_world():
    assert read_world({"PATH": "/bin", "WORLD_SIZE": "4"}) is None


def test_torchrun():
    world = read_world({**TORCHRUN, **MASTER, "TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert world == World("torchrun", 3, 4, 1, 2, "10.0.0.1", 29500, has_store=True)
    assert not world.on_one_host


def test_open_mpi():
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    environ = {f"OMPI_COMM_WORLD_{name}": value for name, value in zip(names, "1212", strict=True)}
    assert read_world(environ) == World("mpirun", 1, 2, 1, 2)


def test_mpich():
    environ = {"PMI_RANK": "2", "PMI_SIZE": "3", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
    assert read_world(environ) == World("mpirun", 2, 3, 0, 1)


def test_our_launcher_comes_first_and_is_read_back_equal():
    world = World("lockstep", 1, 3, 1, 3, "127.0.0.1", 4711, 5)
    assert read_world({VARIABLE: world.dump(), **TORCHRUN, **MASTER}) == world


@pytest.mark.parametrize(
    ("rank", "size", "local_rank", "local_size"), [(2, 2, 0, 1), (-1, 2, 0, 1), (0, 2, 1, 1), (0, 2, 0, 3)]
)
def test_ranks_that_cannot_be_are_refused(rank, size, local_rank, local_size):
    with pytest.raises(SpecError, match="a rank must be below its size"):
        World("torchrun", rank, size, local_rank, local_size)


@pytest.mark.parametrize("text", ["{", "[]", '{"launcher": "lockstep"}', '{"rank": 1, "other": 2}'])
def test_a_damaged_variable_is_refused(text):
    with pytest.raises(SpecError, match=VARIABLE):
        read_world({VARIABLE: text})


def test_the_number_of_workers_must_agree_with_the_launcher():
    world = World("torchrun", 0, 2, 0, 2)
    run = Run(train=Train(lanes=4))
    Launch(world=world, workers=2).check_run(run)
    Launch(world=world, workers="auto").check_run(run)
    with pytest.raises(SpecError, match="torchrun started 2"):
        Launch(world=world, workers=3).check_run(run)


@pytest.mark.parametrize("workers", [0, -1, True, 2.0, "two"])
def test_workers_is_a_number_or_auto(workers):
    with pytest.raises(SpecError, match="--workers"):
        Launch(workers=workers)


def test_srun():
    environ = {
        "SLURM_PROCID": "5",
        "SLURM_STEP_NUM_TASKS": "7",
        "SLURM_LOCALID": "1",
        "SLURM_NODEID": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
        "SLURM_STEP_NODELIST": "gpu[003-005,9],cpu1",
        "SLURM_JOB_ID": "1000",
        "SLURM_STEP_ID": "2",
    }
    assert read_world(environ) == World("srun", 5, 7, 1, 2, "gpu003", 20000 + 31002 % 20000)
    told = {**environ, "MASTER_ADDR": "10.1.1.1", "MASTER_PORT": "4000", "SLURM_STEP_NODELIST": "one"}
    assert read_world(told) == World("srun", 5, 7, 1, 2, "10.1.1.1", 4000)
    hosts = {"one,two": "one", "rack[2-3]node[07,9],x": "rack2node07", "n[1-2]-ib": "n1-ib"}
    for nodes, first in hosts.items():
        assert read_world({**environ, "SLURM_STEP_NODELIST": nodes}).address == first
    shell = {**environ, "SLURM_STEP_ID": str(2**32 - 6)}  # of an interactive step, as salloc may begin one
    assert read_world(shell).size == read_world(environ).size
    batch_script = {"SLURM_PROCID": "0", "SLURM_NTASKS": "7", "SLURM_JOB_ID": "1000"}
    assert read_world(batch_script) is None
    with pytest.raises(SpecError, match="SLURM_PROCID='x' in the environment must be a number"):
        read_world({**environ, "SLURM_PROCID": "x"})
