"""A World: this process's rank and the number of workers, as torchrun, mpirun, srun or our launcher say."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from lockstep.errors import SpecError

STARTED_IN = Path.cwd() if Path().is_dir() else Path("/")  # before a script can change it
VARIABLE = "LOCKSTEP_WORLD"  # in which our own launcher passes the World to a worker
# The variables in which each mpirun passes the rank, the number of processes, and both on this host.
_MPI = {
    "Open MPI": tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    "MPICH": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}
_PORT, _PORTS = 20000, 20000  # where the tasks of a Slurm step meet, unless MASTER_PORT says it
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True)
class World:
    """A worker's rank among `size` workers, and the address of the store at which they meet."""

    launcher: str  # lockstep | torchrun | mpirun | srun
    rank: int
    size: int
    local_rank: int = 0
    local_size: int = 1
    address: str = "127.0.0.1"
    port: int = 0  # 0: worker 0 sends it through MPI
    has_store: bool = False  # the launcher runs the store, not worker 0
    attempt: int = 0
    # Only our own launcher sets the fields below. With it, `rank` and `size` are those on this node; a worker
    # gets its rank in the job with every generation.
    name: str = ""
    joins: bool = False  # the job is already running, or this worker replaces another
    control_fd: int = -1  # the connection to the launcher
    stdout_fd: int = -1  # the launcher's stdout, for worker 0

    def __post_init__(self) -> None:
        if not (0 <= self.rank < self.size and 0 <= self.local_rank < self.local_size <= self.size):
            raise SpecError(
                f"{self.launcher} says worker {self.rank} of {self.size}, {self.local_rank} of "
                f"{self.local_size} on this host: a rank must be below its size; look at the environment"
            )

    @property
    def on_one_host(self) -> bool:
        return self.local_size == self.size

    def dump(self) -> str:
        """The text of `VARIABLE`."""
        return json.dumps(asdict(self))


def read_world(environ: Mapping[str, str]) -> World | None:
    """The world that a launcher put into the environment; None if there is none."""
    if VARIABLE in environ:
        try:
            return World(**json.loads(environ[VARIABLE]))
        except (ValueError, TypeError) as error:
            raise SpecError(
                f"{VARIABLE} in the environment is not what our launcher writes: {error}"
            ) from None
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return _read_torchrun(environ)
    for name, (rank, size, local_rank, local_size) in _MPI.items():
        if rank in environ and size in environ:
            total = _number(environ, size, name)
            return World(
                "mpirun",
                _number(environ, rank, name),
                total,
                _number(environ, local_rank, name, default=0),
                _number(environ, local_size, name, default=1 if total > 1 else total),
            )
    return _read_srun(environ) if "SLURM_STEP_NUM_TASKS" in environ and "SLURM_PROCID" in environ else None


def _read_torchrun(environ: Mapping[str, str]) -> World:
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environ]
    if missing:
        raise SpecError(
            f"RANK and WORLD_SIZE are set as torchrun sets them, but {' and '.join(missing)} not: "
            "start with torchrun, or unset RANK and WORLD_SIZE"
        )
    rank, size, local_rank, local_size = (
        _number(environ, name, "torchrun", default=default)
        for name, default in zip(_TORCHRUN, (None, None, 0, 1), strict=True)
    )
    return World(
        "torchrun",
        rank,
        size,
        local_rank,
        local_size,
        environ["MASTER_ADDR"],
        _number(environ, "MASTER_PORT", "torchrun", most=65535),
        has_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=_number(environ, "TORCHELASTIC_RESTART_COUNT", "torchrun", default=0),
    )


def _read_srun(environ: Mapping[str, str]) -> World:
    """The tasks of a Slurm step; they meet at its first node, and the job's number decides the port."""
    job, step = (_number(environ, f"SLURM_{name}", "srun", default=0) for name in ("JOB_ID", "STEP_ID"))
    tasks = []  # of each node; Slurm writes 2(x3),1 for 2,2,2,1
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", "")):
        tasks += [int(count)] * int(times or 1)
    rank, size = (_number(environ, f"SLURM_{name}", "srun") for name in ("PROCID", "STEP_NUM_TASKS"))
    node = _number(environ, "SLURM_NODEID", "srun", default=0)
    return World(
        "srun",
        rank,
        size,
        _number(environ, "SLURM_LOCALID", "srun", default=0),
        tasks[node] if node < len(tasks) else 1,
        environ.get("MASTER_ADDR") or _first_host(environ.get("SLURM_STEP_NODELIST", "127.0.0.1")),
        _number(environ, "MASTER_PORT", "srun", default=_PORT + (job * 31 + step) % _PORTS, most=65535),
    )


def slurm_job(environ: Mapping[str, str]) -> str | None:
    """The Slurm job that this process is part of, as scontrol takes it; of an array, only its own task."""
    if {"SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"} <= environ.keys():
        return f"{environ['SLURM_ARRAY_JOB_ID']}_{environ['SLURM_ARRAY_TASK_ID']}"
    return environ.get("SLURM_JOB_ID")


def _first_host(nodes: str) -> str:
    """The first of Slurm's list of nodes: of `gpu[003-007,9],cpu1` it is gpu003."""
    return re.sub(r"\[(\w+)[^]]*\]", r"\1", nodes).partition(",")[0]


def _number(
    environ: Mapping[str, str], name: str, launcher: str, default: int | None = None, most: int = 2**32
) -> int:
    text = environ.get(name, "" if default is None else str(default))
    if not text.isdecimal() or int(text) > most:
        raise SpecError(
            f"{name}='{text}' in the environment must be a number up to {most}, as {launcher} sets it"
        )
    return int(text)
