"""The coordinator of a job: launchers join and leave it; it publishes generations and their key-value store.

It runs inside one launcher; the launchers of other nodes connect to it at --rdzv. A launcher forwards its
workers' messages and reports their ends. Requests from a worker of an older generation are ignored.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from lockstep.elastic.job import Job
from lockstep.elastic.membership import Membership
from lockstep.elastic.message import HELLO_BYTES, Message, is_proof, pack, prove, unpack
from lockstep.spec.generation import Generation

BEAT_S = 0.25
SILENT_S = 2.0  # without a message for this long, a launcher counts as cut off or frozen
ADMIT_S = 5.0  # for a new connection to prove the token
_STRANGERS = 64  # the most connections at a time that have not proven the token
_REFORM_S = 2.0  # after a group is lost: if no worker is reported gone by then, the group is formed again


@dataclass
class Node:
    """A launcher that was admitted."""

    number: int
    writer: asyncio.StreamWriter
    host: str
    is_here: bool  # in this process, so it needs no heartbeats
    heard: float = field(default_factory=time.monotonic)
    workers: set[str] = field(default_factory=set)

    def tell(self, op: str, **fields: object) -> None:
        """Send a message; if the launcher is gone, its missing heartbeats show that."""
        with suppress(OSError, RuntimeError):
            self.writer.write(pack(op, **fields))


class Coordinator:
    """Membership and store of one job."""

    def __init__(self, job: Job, say: Callable[[str], None]) -> None:
        self._min_nodes, self._most_nodes = job.nodes
        self._membership = Membership(job.lanes, job.min_workers, self._min_nodes, job.sizes, job.is_split)
        self._is_split, self._token, self._wait_s, self._say = job.is_split, job.token, job.wait_s, say
        self._nodes: dict[int, Node] = {}
        self._count = self._strangers = self._training = 0
        self._values: dict[str, str] = {}
        self._asked: dict[str, list[tuple[Node, str]]] = {}
        self._identity: Message | None = None
        self._run: str | None = None
        self._said_waiting = False
        self._lost_at: float | None = None  # when a worker reported its group lost, without a known cause
        self._short_at: float | None = None

    async def meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a new connection from another node, if it proves the token within `ADMIT_S`."""
        try:
            if self._strangers >= _STRANGERS:
                return
            self._strangers += 1
            try:
                hello = await asyncio.wait_for(self._admit(reader, writer), ADMIT_S)
            finally:
                self._strangers -= 1
            if len(self._nodes) >= self._most_nodes:
                writer.write(pack("refused", why=f"the job already has its {self._most_nodes} nodes"))
                await writer.drain()
            else:
                await self.serve(reader, writer, str(hello.get("host", ""))[:64])
        except (ValueError, OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # no launcher of this job, or the job is over
        finally:
            writer.close()

    async def serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str, is_here: bool = False
    ) -> None:
        """Serve an admitted launcher until it disconnects."""
        node = Node(self._count, writer, host, is_here)
        self._count += 1
        self._nodes[node.number] = node
        node.tell("welcome", node=node.number, joins=self.has_begun)
        why = "is on a node whose launcher ended"
        try:
            while line := await reader.readline():
                node.heard = time.monotonic()
                self._hear(node, unpack(line))
        except (ValueError, OSError, KeyError, TypeError):
            why = "is on a node that sent an invalid message"
        finally:
            self._drop(node, why)
            writer.close()

    async def tend(self) -> None:
        """Check heartbeats and time limits, for as long as the job runs."""
        while True:
            await asyncio.sleep(BEAT_S)
            now = time.monotonic()
            for node in [node for node in self._nodes.values() if not node.is_here]:
                node.tell("beat")
                if now - node.heard > SILENT_S:
                    self._drop(node, f"is on a node that sent no heartbeat for {SILENT_S:g} s")
            if self._lost_at and now - self._lost_at > _REFORM_S:
                self._lost_at = None
                self._membership.renew()
                self._publish()
            if self._short_at and now - self._short_at > self._wait_s:
                self._short_at = None
                saves = "the run stops" if self._is_split else "the state is saved, then the run stops"
                self._say(f"too few workers for {self._wait_s:g} s: {saves}")
                self._tell_generation(self._membership.halt(time.time()))

    @property
    def num_nodes(self) -> int:
        return len(self._nodes)

    @property
    def is_over(self) -> bool:
        """Whether the current training has ended; launchers were told if it failed."""
        return 0 < self._training <= self._membership.over

    @property
    def has_begun(self) -> bool:
        return self._membership.current is not None

    def halt(self, code: int) -> None:
        """Stop workers that wait: for more workers, or for the job to begin; others get a signal."""
        if self._membership.is_short:
            self._short_at = -self._wait_s
        elif not self.has_begun:
            self._finish(1, code)

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Message:
        nonce = secrets.token_hex(16)
        writer.write(pack("who", nonce=nonce))
        line = b""
        while not line.endswith(b"\n"):
            if len(line) >= HELLO_BYTES:
                raise ValueError("too long")
            line += await reader.readexactly(1)
        hello = unpack(line)
        if not is_proof(hello.get("proof"), self._token, nonce, "launcher"):
            writer.write(pack("refused", why="the token does not match"))
            raise ValueError("wrong token")
        writer.write(pack("proof", proof=prove(self._token, str(hello.get("nonce")), "coordinator")))
        return hello

    def _drop(self, node: Node, why: str) -> None:
        """Remove a launcher, and its workers with it."""
        if self._nodes.pop(node.number, None):
            node.tell("refused", why="the job went on without this node")
            with suppress(OSError, RuntimeError):
                node.writer.close()
            for name in node.workers:
                self._membership.remove(name, why, time.time())
            self._publish()

    def _hear(self, node: Node, message: Message) -> None:
        """Handle a launcher's message."""
        match message["op"]:
            case "add":
                node.workers.add(message["worker"])
                self._membership.add(str(message["worker"]), node.number, node.host)
            case "gone":
                node.workers.discard(message["worker"])
                self._membership.remove(message["worker"], str(message["why"]), time.time())
                self._publish()
            case "leave":
                for name, training in self._membership.leave(node.number, time.time()):
                    self._answer(node, name, "over", training=training)
                self._publish()
            case "from" if message["worker"] in node.workers:
                self._hear_worker(node, message["worker"], message["body"])

    def _hear_worker(self, node: Node, name: str, body: Message) -> None:
        """Handle a worker's message, which its launcher forwarded."""
        is_current = body.get("generation") == self._membership.number
        match body["op"]:
            case "ready":
                if self._membership.ready(name, int(body["training"])):
                    self._publish()
                else:
                    self._answer(node, name, "over", training=body["training"])
            case "set" if is_current:
                self._membership.come(name)  # the first value says that it is here
                self._values[body["key"]] = str(body["value"])
                for asker, who in self._asked.pop(body["key"], ()):
                    self._answer(asker, who, "value", key=body["key"], value=body["value"])
            case "get" if is_current:
                if (key := str(body["key"])) in self._values:
                    self._answer(node, name, "value", key=key, value=self._values[key])
                else:
                    self._asked.setdefault(key, []).append((node, name))
            case "lost" if is_current:
                self._lost_at = self._lost_at or time.monotonic()
            case "verdict":
                self._finish(int(body["training"]), int(body["code"]))
            case "settled" if is_current:
                self._membership.settle(name)
                self._tell_generation(self._membership.next(time.time()))  # who joins may have waited for it
            case "stepped" if is_current:
                self._membership.confirm(int(body["generation"]))
            case "job":
                self._identity, self._run = body["identity"], str(body["run"])
            case "ask":
                self._answer(node, name, "job", identity=self._identity)

    def _finish(self, training: int, code: int) -> None:
        """End a training: tell workers that still wait for it; if it failed, tell all launchers."""
        self._membership.finish(training)
        self._short_at = None
        for node in self._nodes.values():
            if code:
                node.tell("over", code=code)
            for name in node.workers:
                self._answer(node, name, "over", training=training)

    def _publish(self) -> None:
        """Publish the next generation, if one is due; say soon after if workers are missing."""
        self._tell_generation(self._membership.next(time.time()))
        if not self._membership.is_short:
            self._short_at = None
        elif self._short_at is None:
            self._short_at = since = time.monotonic()
            told = f"{self._membership.shortage}: too few workers, waiting up to {self._wait_s:g} s for more"
            asyncio.get_running_loop().call_later(BEAT_S, lambda: self._short_at == since and self._say(told))
        if not self.has_begun and 0 < len(self._nodes) < self._min_nodes and not self._said_waiting:
            self._said_waiting = True
            self._say(f"waiting for launchers of other nodes: {len(self._nodes)} here so far")

    def _tell_generation(self, generation: Generation | None) -> None:
        if generation is None:
            return
        self._values, self._asked, self._lost_at = {}, {}, None
        if generation.training != self._training:
            self._training, self._identity, self._run = generation.training, None, None
        for node in self._nodes.values():
            for name in node.workers:
                self._answer(node, name, "generation", **generation.dump(), run=self._run)

    @staticmethod
    def _answer(node: Node, worker: str, op: str, **fields: object) -> None:
        node.tell("to", worker=worker, body={"op": op, **fields})
