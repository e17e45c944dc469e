"""A launcher's way to the keeper of its job: in its own process, or at --rdzv on another node."""

from __future__ import annotations

import asyncio
import errno
import secrets
import socket
from contextlib import suppress

from lockstep.comm.message import LIMIT_BYTES, Message, is_proof, pack, prove, unpack
from lockstep.elastic.keeper import Keeper
from lockstep.errors import LockstepError, SpecError

_REACH_S = 15.0
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def connect_here(keeper: Keeper) -> tuple[Streams, asyncio.Task[None]]:
    """The keeper of this very process, spoken to as any other."""
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=theirs, limit=LIMIT_BYTES)
    serving = asyncio.create_task(keeper.serve(reader, writer, socket.gethostname(), is_here=True))
    return await asyncio.open_connection(sock=ours, limit=LIMIT_BYTES), serving


async def listen(keeper: Keeper, address: str, port: int) -> asyncio.Server | None:
    """Become the keeper at an address; None where it is another host's, or has a keeper already."""
    try:
        return await keeper.listen(address, port)
    except OSError as error:
        if error.errno in (errno.EADDRNOTAVAIL, errno.EADDRINUSE):
            return None
        raise SpecError(f"--rdzv {address}:{port}: {error.strerror or error}") from None


async def connect(address: str, port: int, token: str, patience_s: float) -> Streams:
    """The keeper at another node, each side having proven the token to the other."""
    loop = asyncio.get_running_loop()
    end = loop.time() + patience_s
    while True:
        try:
            return await asyncio.wait_for(_greet(address, port, token), _REACH_S)
        except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            reason = getattr(error, "strerror", None) or str(error) or "no answer"
        if loop.time() > end:
            raise LockstepError(
                f"--rdzv {address}:{port}: no keeper of a job there after {patience_s:.0f} s ({reason}): "
                "start the launcher of that host first, and check the address, the port and the firewall"
            )
        await asyncio.sleep(0.3)


async def _greet(address: str, port: int, token: str) -> Streams:
    reader, writer = await asyncio.open_connection(address, port, limit=LIMIT_BYTES)
    try:
        question = await _read(reader)
        nonce = secrets.token_hex(16)
        proof = prove(token, str(question.get("nonce")), "launcher")
        writer.write(pack("hello", proof=proof, nonce=nonce, host=socket.gethostname()))
        answer = await _read(reader)
        if answer["op"] == "refused":
            raise LockstepError(f"--rdzv {address}:{port} refused this launcher: {answer.get('why')}")
        if not is_proof(answer.get("proof"), token, nonce, "keeper"):
            raise LockstepError(f"--rdzv {address}:{port}: what listens there does not know this job's token")
    except BaseException:
        writer.close()
        raise
    return reader, writer


async def _read(reader: asyncio.StreamReader) -> Message:
    try:
        line = await reader.readline()
        if not line:
            raise ConnectionResetError("it hung up")
        return unpack(line)
    except ValueError:
        raise LockstepError("what listens at --rdzv is no launcher of ours: choose another port") from None


async def own_address(address: str, port: int) -> str:
    """The address by which this host reaches the keeper's."""
    info = await asyncio.get_running_loop().getaddrinfo(address, port, type=socket.SOCK_STREAM)
    family, _, _, _, target = info[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect(target)
        return str(probe.getsockname()[0])
    return address
