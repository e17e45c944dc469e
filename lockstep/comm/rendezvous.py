"""How workers find each other under torchrun and mpirun: address and port, and the store opened there.

Workers meet at a TCP store, which worker 0 or torchrun's agent holds. torchrun tells the workers its address
and port; under mpirun worker 0 opens a port, and MPI broadcasts it. The workers of our own launcher meet by
`elastic/launcher_link.py` instead, and use only `form` and `choose_backend` from here.
"""

from __future__ import annotations

import functools
import itertools
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from lockstep.comm.background import run_in_thread
from lockstep.comm.group import Group
from lockstep.comm.mpi_transport import MpiTransport
from lockstep.comm.transport import TorchTransport
from lockstep.errors import GroupLost, LockstepError, SpecError
from lockstep.spec.system import extra_command
from lockstep.spec.world import World

_REACH_S = 15.0  # to reach the host of worker 0
_LISTEN_S = 60.0  # until worker 0 listens, if its host answers
_GATHER_S = 300.0  # until all workers are here: they may be reading data from a slow disk
_LOOPBACK = "127.0.0.1"
T = TypeVar("T")

_groups = itertools.count()  # a script may train more than once, with a new group each time


def join_world(world: World | None, backend: str, device: torch.device) -> Group:
    """The group of this process's world; a group of one if there is no world."""
    if world is None or world.size == 1:
        return Group()
    if backend == "mpi":
        _, on_one_host = _mpi_group(world)
        return Group(world.rank, world.size, MpiTransport(), on_one_host=on_one_host)
    wanted = choose_backend(backend, world, device)
    store, own_address = _open_store(world)
    store = PrefixStore(f"lockstep/{world.attempt}/{next(_groups)}", store)
    _check_backend(store, world, wanted)
    near = own_address == _LOOPBACK
    return form(store, Place(world.rank, world.size, wanted, own_address, device, near))


@dataclass(frozen=True)
class Place:
    """A worker's part in forming a group."""

    rank: int
    size: int
    backend: str
    address: str  # at which it listens
    device: torch.device  # on which it trains; another may be current in the thread that forms the group
    on_one_host: bool  # whether all workers are on one host


def form(store: Any, place: Place) -> Group:
    """Form the group of all workers that meet at a store."""
    rank, size, reason = place.rank, place.size, ""
    try:
        host = TorchTransport("gloo", store, rank, size, place.address)
        gpu = None
        if place.backend == "nccl":
            gpu = TorchTransport("nccl", PrefixStore("nccl", store), rank, size, place.device)
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
    if reason:
        raise GroupLost(
            f"worker {rank} of {size} could not form the group from {place.address}: are all workers "
            f"running, and can they reach each other? ({reason})"
        )
    group = Group(rank, size, host, gpu, on_one_host=place.on_one_host)
    group.make_part = lambda name, ranks: form(
        PrefixStore(name, store), replace(place, rank=ranks.index(rank), size=len(ranks))
    )
    return group


def listen(address: str, port: int = 0) -> socket.socket:
    """A listening socket on one address, for a store: TCPStore itself would listen on all addresses."""
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise SpecError(
            f"worker 0 cannot listen on {address}:{port}: {error.strerror}; choose another port "
            "(torchrun: --master-port)"
        ) from None
    return listener


def own_address_towards(address: str) -> str:
    """This host's own address on the route to another host; nothing is sent."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
            return str(probe.getsockname()[0])
        except OSError as error:
            raise LockstepError(f"no route to {address} from this host: {error.strerror}") from None


def choose_backend(backend: str, world: World, device: torch.device) -> str:
    """Resolve `auto`: NCCL if every worker has a GPU of its own, else gloo."""
    if backend == "nccl" and not (device.type == "cuda" and dist.is_nccl_available()):
        raise SpecError("--backend nccl needs a GPU and a CUDA build of PyTorch: leave --backend out")
    own_gpu = device.type == "cuda" and world.local_size <= torch.cuda.device_count()
    return ("nccl" if own_gpu and dist.is_nccl_available() else "gloo") if backend == "auto" else backend


@functools.cache
def _open_store(world: World) -> tuple[Any, str]:
    """The store of a world, opened once per process, and the address at which this worker is reached."""
    if world.launcher == "mpirun":
        world, listener = _tell_by_mpi(world)
    elif world.rank == 0 and not world.has_store:
        listener = listen(_resolve(world.address), world.port)
    else:
        listener = None
    address = _resolve(world.address)
    own_address = _LOOPBACK if world.on_one_host else own_address_towards(address)
    if listener is None:
        _wait_for_listener(world, address)
    make = functools.partial(
        TCPStore,
        address,
        world.port,
        is_master=listener is not None,
        wait_for_workers=False,
        timeout=timedelta(seconds=_REACH_S),
        master_listen_fd=listener.detach() if listener else None,
    )
    try:
        store = _within(_REACH_S, make)
    except (RuntimeError, ValueError, TimeoutError) as error:
        first = str(error).strip().splitlines()[0]
        raise LockstepError(
            f"worker {world.rank}: what listens on {world.address}:{world.port} is not worker 0 of this run: "
            f"is the port in use by something else? choose another ({first})"
        ) from None
    store.set_timeout(timedelta(seconds=_GATHER_S))
    return store, own_address


def _within(seconds: float, make: Callable[[], T]) -> T:
    """The result of `make`, or a TimeoutError: a store waits forever for a listener that never answers."""
    try:
        return run_in_thread(make, None).result(seconds)
    except TimeoutError:
        raise TimeoutError(f"no answer within {seconds:.0f} s") from None


def _resolve(address: str) -> str:
    try:
        return str(socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise LockstepError(
            f"the host of worker 0, '{address}', is unknown: {error.strerror}; check MASTER_ADDR"
        ) from None


def _wait_for_listener(world: World, address: str) -> None:
    start = time.monotonic()
    while True:
        try:
            socket.create_connection((address, world.port), timeout=_REACH_S).close()
            return
        except OSError as error:
            reason = error.strerror or str(error)
            limit = _LISTEN_S if isinstance(error, ConnectionRefusedError) else _REACH_S
        waited = time.monotonic() - start
        if waited + 0.2 > limit:
            raise LockstepError(
                f"worker {world.rank} cannot reach worker 0 at {world.address}:{world.port} after "
                f"{waited:.0f} s: {reason}; check that it runs, MASTER_ADDR, MASTER_PORT and the firewall"
            ) from None
        time.sleep(0.2)


def _check_backend(store: Any, world: World, backend: str) -> None:
    if world.rank == 0:
        store.set("backend", backend)
    try:
        theirs = store.get("backend").decode()
    except RuntimeError:
        raise GroupLost(f"worker {world.rank}: worker 0 did not come within {_GATHER_S:.0f} s") from None
    if theirs != backend:
        raise SpecError(
            f"worker {world.rank} would use {backend} where worker 0 uses {theirs}: pass one --backend to all"
        )


def _tell_by_mpi(world: World) -> tuple[World, socket.socket | None]:
    """Worker 0's endpoint, broadcast by MPI; loopback if all workers are on one host."""
    group, on_one_host = _mpi_group(world)
    listener, message = None, b""
    if world.rank == 0:
        listener = listen(_LOOPBACK if on_one_host else own_address_towards("192.0.2.1"))
        message = "{} {}".format(*listener.getsockname()[:2]).encode()
    address, port = group.broadcast_bytes(message).decode().split()
    size = world.size if on_one_host else world.local_size
    told = World("mpirun", world.rank, world.size, world.local_rank, size, address, int(port))
    return told, listener


def _mpi_group(world: World) -> tuple[Group, bool]:
    """The group of all MPI processes, and whether they are on one host."""
    _import_mpi(world)
    group = Group(world.rank, world.size, MpiTransport())
    return group, len(set(group.all_gather_bytes(socket.gethostname().encode()))) == 1


def _import_mpi(world: World) -> None:
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise SpecError(
            f"mpirun started {world.size} workers, but mpi4py cannot be imported: "
            f"{extra_command('mpi')} ({error})"
        ) from None
    except RuntimeError as error:
        raise SpecError(
            f"mpirun started {world.size} workers, but mpi4py finds no MPI library: set MPI4PY_LIBMPI to the "
            f"libmpi.so of this mpirun ({str(error).splitlines()[0]})"
        ) from None
    if MPI.COMM_WORLD.size != world.size:
        library = MPI.Get_library_version().split(",")[0].strip()
        raise SpecError(
            f"mpirun started {world.size} workers, but mpi4py sees {MPI.COMM_WORLD.size}: it uses {library}, "
            "and mpirun is another MPI's; call that library's mpirun, or set MPI4PY_LIBMPI to the other one"
        )
