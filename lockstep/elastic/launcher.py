"""The launcher of a node: starts workers, ends silent or stopped ones by its time limits, replaces lost ones.

It also forwards signals, shows the workers' stderr, tells the job's coordinator which workers live, and ends
all of them when it ends. It imports no torch; the fork server does.
"""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from lockstep.elastic.coordinator_link import Link
from lockstep.elastic.job import Job
from lockstep.elastic.message import Message
from lockstep.elastic.process_control import fate, is_stopped
from lockstep.elastic.restart import Restarts
from lockstep.elastic.stop_request import StopRequests
from lockstep.elastic.worker_command import WorkerCommand, own_command
from lockstep.elastic.worker_process import Processes, Worker
from lockstep.spec.launch import RESTART_CODE
from lockstep.spec.start.stop_signal import STOPPING, WARNING

Show = Callable[[str, str], None]  # gets the name of a worker and a line
_FROZEN_S = 1.0  # a worker that is stopped (SIGSTOP) for this long is killed
_DEAF_S = 60.0  # a worker without heartbeats for this long hangs as a whole, and is killed
_LOOK_S = 0.2
_ASK_EVERY_S = 0.5  # between two SIGTERMs: after the first a worker still finishes its step
_GRACE_S = 10.0  # for workers to end by themselves, before they are killed
_SAVED_S = 40.0  # the same once they have saved: worker 0 may wait for a batch system's answer


class Launcher:
    """Starts a job's workers on this node and waits; they run `command`, by default that of this process."""

    def __init__(self, job: Job, show: Show, command: WorkerCommand | None = None) -> None:
        self._job, self._show, self._command = job, show, command
        self._processes = Processes(self._hear_worker, self._born, self._ended, self._print)
        self._link = Link(job, self._hear_coordinator, self._say)
        self._count, self._restarts, self._pending = 0, Restarts(job.restarts), 0
        self._signals, self._verdict = StopRequests(), 0  # the exit code of an error that all workers share
        self._asked, self._end = 0.0, float("inf")  # when workers were last asked to end; when to kill

    def run(self) -> int:
        """Start the workers, wait for all, and return the exit code of the job."""
        return asyncio.run(self._main())

    async def _main(self) -> int:
        loop = asyncio.get_running_loop()
        if threading.current_thread() is threading.main_thread():
            for number in STOPPING:
                loop.add_signal_handler(number, self._take_signal, number)
        command = self._command or own_command()
        try:
            self._processes.open(command, self._job.preload)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {WARNING})  # what it has started may go on to hold it
            await self._link.open()
            while not await self._serve():
                await self._rejoin()
            await self._wait_for_nodes()
            return self._judge()
        finally:
            self._processes.close()
            await self._link.close()

    async def _serve(self) -> bool:
        """Take part in the job until the workers here have ended; False if the coordinator is lost first."""
        joins = await self._link.enter()
        for slot in range(self._job.workers):
            if not self._signals:
                self._start(slot, joins)
        try:
            while (self._processes.alive() or self._pending) and not self._is_lost():
                await self._processes.wait(_LOOK_S)
                now = time.monotonic()
                self._look(now)
                self._link.beat(now)
                if self._verdict or self._signals.num_wishes > 1:
                    self._end_workers(now)
        finally:
            self._link.stop_hearing()
        return not self._is_lost()

    def _end_workers(self, now: float) -> None:
        """Ask workers to end, again and again; those that told or hear a verdict end by themselves."""
        if now <= self._asked + _ASK_EVERY_S:
            return
        wishes = self._signals.num_wishes
        killing = now > self._end or wishes > 2
        if killing or wishes > 1 or not (self._job.is_elastic or self._processes.finished()):
            but = None if wishes > 1 else 0  # worker 0's script may have caught the shared error
            self._processes.signal_all(signal.SIGKILL if killing else signal.SIGTERM, but)
        grace_s = _SAVED_S if self._signals and wishes < 2 else _GRACE_S
        self._asked, self._end = now, min(self._end, now + grace_s)

    def _is_lost(self) -> bool:
        """Whether this node has lost the job; that no longer matters after training, or while it stops."""
        return bool(self._link.lost) and not (self._processes.finished() or self._verdict or self._signals)

    async def _rejoin(self) -> None:
        """Kill the workers here, since others have their lanes now, and connect to the coordinator again."""
        self._link.drop()  # from here on a signal ends this launcher
        self._processes.signal_all(signal.SIGKILL)
        while self._processes.alive() or self._pending:  # `_replace` starts no worker now
            await self._processes.wait(_LOOK_S)
        self._say(f"{self._link.lost}: the workers here are stopped; trying to join again")
        await self._link.reach()

    async def _wait_for_nodes(self) -> None:
        """Wait for the other nodes: the coordinator's launcher ends last."""
        end = time.monotonic() + _GRACE_S
        while self._link.coordinator and self._link.coordinator.num_nodes > 1:
            if (self._verdict or self._processes.finished() or self._signals) and time.monotonic() > end:
                return
            await asyncio.sleep(_LOOK_S)

    def _start(self, slot: int, joins: bool) -> None:
        node = self._link.node
        name = f"{node}.{self._count}" if node else str(self._count)
        speaks = node == 0 and self._count == 0
        self._count += 1
        self._link.tell("add", worker=name)
        self._processes.start(
            Worker(name, slot, time.monotonic()),
            {
                "rank": slot,
                "size": self._job.workers,
                "local_rank": slot,
                "local_size": self._job.workers,
                "address": self._link.address,
                "name": name,
                "joins": joins,
            },
            speaks,
        )

    def _born(self, worker: Worker) -> None:
        """A worker's process has started; send it a signal that came before."""
        if self._signals and self._link.coordinator:
            self._processes.send_signal(worker, self._signals.first)

    def _ended(self, worker: Worker) -> None:
        """A worker has ended: report it, and replace it if it was killed."""
        code, why = worker.code, fate(worker.code, worker.why)
        self._link.tell("gone", worker=worker.name, why=why)
        if why and not self._job.is_elastic and not (self._verdict or self._signals):
            self._verdict = max(code, 1)
            if code < 0:
                self._say(f"worker {worker.name} {why}")
        over = self._verdict or worker.rank is not None or self._signals or self._link.lost
        if over or self._processes.fork_server_ended or not (code < 0 or code == RESTART_CODE):
            return
        if self._job.tells_losses:
            self._say(f"worker {worker.name} {why}; the others go on with its lanes")
        now, most = time.monotonic(), self._job.restarts
        wait_s = self._restarts.wait_s(worker.slot, now - worker.started, now)
        if wait_s is not None:
            self._pending += 1
            asyncio.get_running_loop().call_later(wait_s, self._replace, worker.slot)
        elif most:
            self._say(f"worker {worker.name} {why} and is not replaced: {most} --restarts an hour are used")

    def _replace(self, slot: int) -> None:
        self._pending -= 1
        if not (self._signals or self._verdict or self._link.lost):
            self._start(slot, joins=True)

    def _look(self, now: float) -> None:
        """Kill workers that are frozen or hang; wake a frozen fork server."""
        if self._processes.is_fork_server_stopped():
            self._processes.wake_fork_server()
        for worker in self._processes.alive():
            if not is_stopped(worker.pid):
                worker.stopped_at = None
            elif worker.stopped_at is None:
                worker.stopped_at = now
            elif now - worker.stopped_at > _FROZEN_S:
                self._fence(worker, f"was frozen for {_FROZEN_S:g} s and is ended")
            if worker.beats and now - worker.heard > _DEAF_S:
                self._fence(worker, f"sent no heartbeat for {_DEAF_S:g} s and is ended")

    def _fence(self, worker: Worker, why: str) -> None:
        worker.why = why
        self._processes.send_signal(worker, signal.SIGKILL)

    def _hear_worker(self, worker: Worker, message: Message) -> None:
        worker.heard, worker.beats = time.monotonic(), True
        if message["op"] == "verdict":
            worker.rank = int(message["rank"])
            self._verdict = int(message["code"]) or self._verdict
        if message["op"] != "beat":
            self._link.tell("from", worker=worker.name, body=message)

    def _hear_coordinator(self, message: Message) -> None:
        if message["op"] == "to":
            self._processes.tell(message["worker"], message["body"])
        elif message["op"] == "over":
            self._verdict = int(message["code"])

    def _take_signal(self, number: signal.Signals) -> None:
        """Forward the first signal to the workers; on another node leave the job, unless all are warned."""
        if not self._signals.note(number):
            return
        if self._link.coordinator:
            self._link.coordinator.halt(128 + number)
        if self._link.coordinator or number == WARNING:
            self._processes.signal_all(signal.Signals(number))
        elif self._link.is_open:
            self._link.tell("leave")
        else:
            raise SystemExit(128 + number)

    def _say(self, text: str) -> None:
        self._print("", f"lockstep: {text}")

    def _print(self, worker: str, text: str) -> None:
        with suppress(OSError):  # nobody reads our output; the workers go on
            self._show(worker, text)

    def _judge(self) -> int:
        """The exit code; also says which worker was killed, as that one cannot."""
        finished = self._processes.finished()
        if self._signals and self._link.coordinator and not self._link.coordinator.has_begun:
            self._say(f"stopped by {self._signals.first.name} before its workers began")
            return 128 + self._signals.first
        if self._verdict and not self._link.coordinator:
            self._say(f"the job ended with exit code {self._verdict}: its coordinator's launcher says why")
        if finished and finished[0].rank == 0 and finished[0].code >= 0:
            return finished[0].code  # its script may have caught the shared error
        if self._verdict or finished:
            return self._verdict or max(finished[0].code, 0)
        if self._signals:
            place = f" in the middle of a step{self._job.advice}" if self._job.is_elastic else ""
            place = place if self._link.coordinator else ": this node left the job, which goes on"
            self._say(f"stopped by {self._signals.first.name}{place}")
            return 128 + self._signals.first
        if self._processes.fork_server_ended:
            trained = any(worker.beats for worker in self._processes.all())
            self._say(f"the process that starts workers has ended{self._job.advice if trained else ''}")
            return 1
        failed = self._processes.last_failed()
        if self._link.coordinator and self._link.coordinator.is_over:
            return 0  # the workers of other nodes finished the training
        if failed and failed.code < 0:
            why = fate(failed.code, failed.why)
            self._say(f"worker {failed.name} {why}, and no worker is left{self._job.advice}")
        return (failed.code if failed.code > 0 else 1) if failed else 0
