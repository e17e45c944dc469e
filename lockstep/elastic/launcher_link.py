"""A worker's connection to its launcher: heartbeats, generations, and the store by which a group is formed.

One thread receives the launcher's messages. If a new generation begins because a worker was lost, it cuts the
current group, so that this worker stops waiting for the lost one. Another thread sends heartbeats.
"""

from __future__ import annotations

import base64
import os
import socket
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from lockstep.comm.background import run_in_thread
from lockstep.comm.group import Group
from lockstep.comm.rendezvous import Place, form
from lockstep.elastic.message import Message, pack, unpack
from lockstep.errors import GroupLost, SpecError
from lockstep.spec.generation import Generation
from lockstep.spec.world import World

_BEAT_S = 0.5
_FORM_S = 1800.0  # for all workers of a generation to arrive: they may be evaluating, or saving
_CHUNK = 1 << 16


class LauncherLink:
    """The connection to the launcher; one per process, for all its trainings."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._socket = socket.socket(fileno=world.control_fd)
        self._sending = threading.Lock()
        self._news = threading.Condition()
        self._newest: Generation | None = None
        self._entered = 0  # the generation whose group this worker is in, or forms
        self._group: Group | None = None
        self._values: dict[str, str] = {}
        self._job: Message | None = None
        self._training = self._over = 0  # this worker's training, and the last one that has ended
        self.run: str | None = None  # the run's directory, if the job has one already
        threading.Thread(target=self._hear, name="lockstep-control", daemon=True).start()
        threading.Thread(target=self._beat, name="lockstep-beat", daemon=True).start()

    def say(self, op: str, **fields: Any) -> None:
        """Send a message to the launcher, which forwards all but heartbeats to the coordinator."""
        with self._sending:
            self._socket.sendall(pack(op, **fields))

    def ask_identity(self) -> dict[str, object] | None:
        """The identity of the job that this worker joins, if it has begun."""
        self.say("ask")
        with self._news:
            self._news.wait_for(lambda: self._job)
            assert self._job
            identity: dict[str, object] | None = self._job["identity"]
            return identity

    def wait(self, training: int) -> Generation | None:
        """Wait for a generation that is newer than this worker's; None if the training is over."""
        with self._news:
            self._training = training
            self._news.wait_for(lambda: self._is_over() or self._is_news(training))
            if self._is_over() or self._newest is None:
                return None
            self._entered, self._values = self._newest.number, {}
            return self._newest

    def form(self, generation: Generation, backend: str, device: torch.device) -> Group:
        """Form the group of a generation; GroupLost if the next generation comes first."""
        size = len(generation.everyone)
        if size == 1:
            return Group()
        rank = generation.everyone.index(self._world.name)
        self._meet(generation.number, rank, size, backend)
        store, near = _Store(self, generation.number), len(set(generation.nodes)) == 1
        place = Place(rank, size, backend, self._world.address, device, near)
        group = self._unless_news(lambda: form(store, place), device)
        with self._news:
            self._group = group
            if self._is_news():  # it came while the group was being formed and could not be cut
                group.cut()
        return group

    def leave(self) -> None:
        """Forget the group: it is no longer used, and need not be cut."""
        with self._news:
            self._group = None

    @property
    def wants_to_move(self) -> bool:
        """Whether a generation is planned that this worker should move to after its step."""
        return self._is_news()

    def report_lost(self) -> None:
        """Report a failed group, unless a new generation has come; the coordinator has it formed again."""
        if not self._is_news():
            self.say("lost", generation=self._entered)

    def set(self, generation: int, key: str, value: bytes) -> None:
        """Put a value into the store of a generation."""
        self.say("set", generation=generation, key=key, value=base64.b64encode(value).decode())

    def get(self, generation: int, key: str) -> bytes:
        """Wait for a value of the store; a RuntimeError if the generation ends first."""
        if key not in self._values:
            self.say("get", generation=generation, key=key)
        with self._news:
            found = self._news.wait_for(
                lambda: key in self._values or self._newest_number() > generation or self._is_over(), _FORM_S
            )
            left = self._entered != generation  # this thread was abandoned in `_unless_news`
            if left or not found or key not in self._values:
                raise RuntimeError(
                    "another generation has begun" if found else f"no '{key}' in {_FORM_S:g} s"
                )
            return base64.b64decode(self._values[key])

    def _meet(self, generation: int, rank: int, size: int, backend: str) -> None:
        """Wait until all workers are here: gloo would wait forever to connect to a worker that has died."""
        self.set(generation, f"here/{rank}", backend.encode())
        try:
            theirs = [self.get(generation, f"here/{other}").decode() for other in range(size)]
        except RuntimeError as error:
            raise GroupLost(str(error)) from None
        if theirs[rank] != theirs[0]:
            raise SpecError(
                f"worker {self._world.name} would use {backend} where worker 0 uses {theirs[0]}: give "
                "--backend to all"
            )

    def _unless_news(self, make: Callable[[], Group], device: torch.device) -> Group:
        """The result of `make`, from a thread that is abandoned if the next generation comes first.

        The parts of the group are made like this, too, and so are theirs: those of workers beside givers.
        """
        found = run_in_thread(make, device)
        found.add_done_callback(lambda _: self._notify())
        with self._news:
            self._news.wait_for(lambda: found.done() or self._is_news())
        if not found.done():
            raise GroupLost("another generation has begun")
        group = found.result()
        if part := group.make_part:
            group.make_part = lambda name, ranks: self._unless_news(lambda: part(name, ranks), device)
        return group

    def _notify(self) -> None:
        with self._news:
            self._news.notify_all()

    def _is_over(self) -> bool:
        return self._over >= self._training

    def _newest_number(self) -> int:
        return self._newest.number if self._newest else 0

    def _is_news(self, training: int | None = None) -> bool:
        newest = self._newest
        return (
            newest is not None
            and newest.number > self._entered
            and (training is None or newest.training == training)
        )

    def _hear(self) -> None:
        rest = b""
        while data := self._socket.recv(_CHUNK):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._take(unpack(line + b"\n"))
        os._exit(1)  # the launcher has ended, and no worker outlives it

    def _take(self, message: Message) -> None:
        with self._news:
            match message.pop("op"):
                case "generation":
                    self.run = message.pop("run")
                    self._newest = Generation.load(message)
                    if self._group and not self._newest.planned:
                        self._group.cut()
                case "value":
                    self._values[message["key"]] = message["value"]
                case "job":
                    self._job = message
                case "over":
                    self._over = max(self._over, message["training"])
            self._news.notify_all()

    def _beat(self) -> None:
        stop = threading.Event()
        while not stop.wait(_BEAT_S):
            try:
                self.say("beat")
            except OSError:
                return


class _Store(dist.Store):  # type: ignore[misc,name-defined]
    """The store of one generation, as a torch Store; the job's coordinator keeps its values."""

    def __init__(self, control: LauncherLink, generation: int) -> None:
        super().__init__()
        self._link, self._generation = control, generation

    def set(self, key: str, value: Any) -> None:
        self._link.set(
            self._generation, key, bytes(value, "utf-8") if isinstance(value, str) else bytes(value)
        )

    def get(self, key: str) -> bytes:
        return self._link.get(self._generation, key)

    def wait(self, keys: list[str], timeout: Any = None) -> None:
        for key in keys:
            self._link.get(self._generation, key)

    def check(self, keys: list[str]) -> bool:
        """Always False: NCCL asks now and then for error reports of other workers, and ours write none."""
        return False
