"""A launcher's connection to the coordinator, here or at --rdzv: when it is cut off, and joins again."""

from __future__ import annotations

import asyncio
import errno
import secrets
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import suppress

from lockstep.elastic.certificates import Certificates
from lockstep.elastic.coordinator import ADMIT_S, SILENT_S, Coordinator
from lockstep.elastic.job import Job
from lockstep.elastic.message import LIMIT_BYTES, Message, is_proof, pack, prove, unpack
from lockstep.errors import GroupLost, LockstepError, SpecError

_REACH_S = 15.0
_SEARCH_S = 30.0  # to find the coordinator, at the start and for a node that was cut off
_AGAIN_S = 0.3
_LOOPBACK = "127.0.0.1"
_Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Link:
    """A launcher's connection to its job's coordinator; `hear` is called with every message from there."""

    def __init__(self, job: Job, hear: Callable[[Message], None], say: Callable[[str], None]) -> None:
        self._job, self._hear, self._say = job, hear, say
        self._tls = Certificates(job.tls) if job.tls else None
        self._server: asyncio.Server | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._heard = 0.0
        self.coordinator: Coordinator | None = None  # if it is in this process
        self.node = 0  # the number of this node in the job
        self.address = _LOOPBACK  # at which workers of other nodes reach the workers here
        self.lost = ""  # why the coordinator is lost; empty once this node has entered again

    async def open(self) -> None:
        """Start the coordinator in this process, or connect to the one on another node."""
        job = self._job
        coordinator = Coordinator(job, self._say)
        if job.rdzv:
            self._server = await self._listen(coordinator, *job.rdzv)
            if self._server is None:
                return await self.reach()
            self.address = job.rdzv[0]
        self.coordinator = coordinator
        self._tending = asyncio.create_task(coordinator.tend())
        self._streams, self._serving = await _connect_here(coordinator)

    async def reach(self) -> None:
        """Connect to the coordinator on another node."""
        assert self._job.rdzv
        self._say("looking for the coordinator at {}:{}".format(*self._job.rdzv))
        try:
            self._streams = await _connect(*self._job.rdzv, self._job.token, self._tls)
        except LockstepError as error:
            raise GroupLost(f"{self.lost}; {error}") if self.lost else error from None
        self.address = await _own_address(*self._job.rdzv)

    async def enter(self) -> bool:
        """Join the job as a node, and receive messages from now on; True if the job is already running."""
        reader, self._writer = self._streams
        line = await reader.readline()
        welcome = unpack(line) if line else {"op": "refused", "why": "it closed the connection"}
        if welcome["op"] != "welcome":
            raise LockstepError(f"the job refused this launcher: {welcome.get('why')}")
        self.node, self.lost, self._heard = int(welcome["node"]), "", time.monotonic()
        if self._job.rdzv and not self.coordinator:
            self._say("this is node {} of the job at {}:{}".format(self.node, *self._job.rdzv))
        self._hearing = asyncio.create_task(self._listen_to(reader))
        return bool(welcome["joins"])

    @property
    def is_open(self) -> bool:
        return self._writer is not None

    def tell(self, op: str, **fields: object) -> None:
        """Send a message; if the coordinator is gone, its missing heartbeats show that."""
        with suppress(OSError, RuntimeError):
            if self._writer:
                self._writer.write(pack(op, **fields))

    def beat(self, now: float) -> None:
        """Send a heartbeat to a coordinator on another node, and check that its own arrive."""
        if not self.coordinator:
            if now - self._heard > SILENT_S:
                self.lost = f"the coordinator of the job did not answer for {SILENT_S:g} s"
            self.tell("beat")

    def stop_hearing(self) -> None:
        """Ignore further messages: the workers here have ended, or the coordinator is lost."""
        self._hearing.cancel()

    def drop(self) -> None:
        """Close the connection; `reach` can open a new one."""
        if self._writer:
            self._writer.close()
        self._writer = None

    async def close(self) -> None:
        """Close the connection for good, and end a coordinator in this process."""
        self.drop()
        if self._server:
            self._server.close()
        if self.coordinator:
            self._tending.cancel()
            await asyncio.wait([self._serving], timeout=1.0)

    async def _listen(self, coordinator: Coordinator, address: str, port: int) -> asyncio.Server | None:
        """Let the coordinator listen at an address; None if it is another host's, or already in use."""
        await self._resolve_name(address, port)
        tls = self._tls.server if self._tls else None
        try:
            return await asyncio.start_server(
                coordinator.meet,
                address,
                port,
                limit=LIMIT_BYTES,
                ssl=tls,
                ssl_handshake_timeout=ADMIT_S if tls else None,
            )
        except OSError as error:
            # newer Pythons give no number if none of a name's addresses could be bound
            if error.errno in (None, errno.EADDRNOTAVAIL, errno.EADDRINUSE):
                return None
            raise SpecError(f"--rdzv {address}:{port}: {error.strerror or error}") from None

    async def _resolve_name(self, address: str, port: int) -> None:
        """Wait until a host is known by name: who starts all nodes at once may make their names later."""
        loop = asyncio.get_running_loop()
        start, waits = loop.time(), False
        while True:
            try:
                await loop.getaddrinfo(address, port, type=socket.SOCK_STREAM)
                return
            except socket.gaierror as error:
                if not waits:
                    self._say(f"--rdzv {address}:{port}: {error.strerror}; trying for {_SEARCH_S:.0f} s")
                waits = True
                if loop.time() > start + _SEARCH_S:
                    raise LockstepError(f"--rdzv {address}:{port}: no host of this name is known") from None
            await asyncio.sleep(_AGAIN_S)

    async def _listen_to(self, reader: asyncio.StreamReader) -> None:
        """Receive the coordinator's messages until it is lost."""
        reason = "the launcher that holds the store has ended"
        with suppress(OSError, ValueError):
            while line := await reader.readline():
                message = unpack(line)
                self._heard = time.monotonic()
                if message["op"] == "refused":
                    reason = str(message.get("why"))
                self._hear(message)
        self.lost = self.lost or reason


async def _connect_here(coordinator: Coordinator) -> tuple[_Streams, asyncio.Task[None]]:
    """Connect to the coordinator in this process, with the same messages as between nodes."""
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=theirs, limit=LIMIT_BYTES)
    serving = asyncio.create_task(coordinator.serve(reader, writer, socket.gethostname(), is_here=True))
    return await asyncio.open_connection(sock=ours, limit=LIMIT_BYTES), serving


async def _connect(address: str, port: int, token: str, tls: Certificates | None) -> _Streams:
    """Connect to the coordinator on another node; each side proves the token to the other."""
    loop = asyncio.get_running_loop()
    end = loop.time() + _SEARCH_S
    while True:
        try:
            return await asyncio.wait_for(_greet(address, port, token, tls), _REACH_S)
        except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            if tls and isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
                raise tls.explain(error, f"{address}:{port}") from None
            reason = getattr(error, "strerror", None) or str(error) or "no answer"
        if loop.time() > end:
            raise LockstepError(
                f"--rdzv {address}:{port}: no coordinator of a job there after {_SEARCH_S:.0f} s ({reason}): "
                "start the launcher of that host first, and check the address, the port and the firewall"
            )
        await asyncio.sleep(_AGAIN_S)


async def _greet(address: str, port: int, token: str, tls: Certificates | None) -> _Streams:
    encrypted = tls.client if tls else None
    reader, writer = await asyncio.open_connection(address, port, limit=LIMIT_BYTES, ssl=encrypted)
    try:
        question = await _read(reader)
        nonce = secrets.token_hex(16)
        proof = prove(token, str(question.get("nonce")), "launcher")
        writer.write(pack("hello", proof=proof, nonce=nonce, host=socket.gethostname()))
        answer = await _read(reader)
        if answer["op"] == "refused":
            raise LockstepError(f"--rdzv {address}:{port} refused this launcher: {answer.get('why')}")
        if not is_proof(answer.get("proof"), token, nonce, "coordinator"):
            raise LockstepError(f"--rdzv {address}:{port}: what listens there does not know this job's token")
    except BaseException:
        writer.close()
        raise
    return reader, writer


async def _read(reader: asyncio.StreamReader) -> Message:
    try:
        line = await reader.readline()
        if not line:
            raise ConnectionResetError(
                "it closed the connection; does it want --tls, or another certificate?"
            )
        return unpack(line)
    except ValueError:
        raise LockstepError("what listens at --rdzv is no Lockstep launcher: choose another port") from None


async def _own_address(address: str, port: int) -> str:
    """This host's own address on the route to the coordinator."""
    info = await asyncio.get_running_loop().getaddrinfo(address, port, type=socket.SOCK_STREAM)
    family, _, _, _, target = info[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect(target)
        return str(probe.getsockname()[0])
    return address
