"""Several real workers for tests: the launchers there are, and groups of threads that talk by real gloo."""

from __future__ import annotations

import itertools
import os
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from patience import PATIENCE_S

from lockstep.comm.group import Group
from lockstep.comm.transport import TorchTransport

PREFIX = Path(sys.prefix)
# Each MPI has a prefix of its own in the environment that make sets up, and its library a number.
MPI = {"openmpi": "libmpi.so.40", "mpich": "libmpi.so.12"}


def has_mpi(name: str) -> bool:
    """Whether this MPI was installed beside the tests' Python."""
    return (PREFIX / name / "lib" / MPI[name]).is_file()


def launched(launcher: str, workers: int, train: list[str]) -> tuple[list[str], dict[str, str]]:
    """A `python … -m lockstep …` command under one of the launchers, and its environment."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    python, *arguments = train
    if launcher == "lockstep":
        return [*train, "--workers", str(workers)], env
    if launcher == "torchrun":
        module = arguments[arguments.index("-m") :]
        run = [python, "-W", "error", "-m", "torch.distributed.run", "--standalone"]
        return [*run, f"--nproc-per-node={workers}", *module], env
    prefix = PREFIX / launcher
    env["MPI4PY_LIBMPI"] = str(prefix / "lib" / MPI[launcher])
    flags = ["--allow-run-as-root", "--oversubscribe"] if launcher == "openmpi" else []
    return [str(prefix / "bin" / "mpirun"), *flags, "-n", str(workers), *train], env


_ports = itertools.count(20_000 + os.getpid() * 97 % 8_000)


def free_port() -> int:
    """A port of 127.0.0.1 that is free, and that no system gives to who asks for any port."""
    for port in _ports:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError


def in_threads(size: int, work: Callable[[Group], Any], timeout_s: float = PATIENCE_S) -> list[Any]:
    """Run `work` on every rank of a gloo group, a thread each; gives what they return, in order of rank."""
    store = dist.HashStore()
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            transport = None
            if size > 1:
                transport = TorchTransport("gloo", store, rank, size, "127.0.0.1")
            group = Group(rank, size, transport)
            results[rank] = work(group)
            group.close()
        except BaseException as error:
            errors.append(error)

    store.set_timeout(timedelta(seconds=timeout_s))
    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
        assert errors or not thread.is_alive(), "a worker did not come back"
    if errors:
        raise errors[0]
    return results
