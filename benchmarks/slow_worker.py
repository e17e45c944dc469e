"""One worker of slow_links.py, in a process of its own: exchanges and steps of every scheme at every rate.

All workers do the same at once; worker 0 asks the parent for another rate, and prints what was found. A time
is that of the slowest worker.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ddp_peer import HOOKS, START, make_ddp
from reduction import slowest
from shaped_link import INTERFACE, address
from torch.nn import functional as F

from lockstep.comm.bucket import ReducedTensor
from lockstep.comm.compress.feedback import Feedback
from lockstep.comm.group import Group
from lockstep.comm.mesh import plain_mesh
from lockstep.comm.reducer import Reducer
from lockstep.comm.transport import Round, TorchTransport
from lockstep.data.loader import Lanes
from lockstep.kernels.loss import heads_loss, make_loss
from lockstep.kernels.numerics import plain_torch, prepare_device
from lockstep.lower.lane_by_lane import LaneByLane
from lockstep.models import build_model
from lockstep.runs.train_state import TrainState
from lockstep.spec import Model, Optimizer, Run, Train
from lockstep.train.result import StepResult
from lockstep.train.step import Step

PORT, SHAPE, CLASSES = 29633, (3, 224, 224), 1000
SHORT_S, LONG_S = 2.0, 10.0  # steps: below, five count; above, two, and none is left out
RING_S = 0.3
Times = list[float]
Rows = dict[str, dict[str, Any]]  # by rate: what was measured, by name


@dataclass(frozen=True)
class Task:
    """What is measured; a lane of each worker has so many images."""

    model: str
    workers: int
    images: int
    rates: tuple[str, ...]
    schemes: tuple[str, ...]

    def run(self, lanes: int, scheme: str = "none") -> Run:
        train = Train(epochs=1, batch=lanes * self.images, lanes=lanes, compress=scheme)
        return Run(model=Model(self.model), train=train, optimizer=Optimizer("momentum", lr=1e-4))


class Worker:
    """What all phases share: a group, a model, a lane of random images."""

    def __init__(self, task: Task, rank: int) -> None:
        self.task, wait = task, timedelta(minutes=10)
        self.store = dist.TCPStore(address(0), PORT, task.workers, is_master=rank == 0, timeout=wait)
        transport = TorchTransport("gloo", self.store, rank, task.workers, address(rank))
        self.group, self.device = Group(rank, task.workers, transport), torch.device("cpu")
        maker = torch.Generator().manual_seed(rank)
        self.images = torch.randn(task.images, *SHAPE, generator=maker)
        self.labels = torch.randint(CLASSES, (task.images,), generator=maker)

    def reshape(self, rate: str) -> None:
        """Have all links at a rate."""
        self.group.barrier()
        self.tell(rate=rate)
        if self.group.rank == 0:
            sys.stdin.readline()
        self.group.barrier()

    def tell(self, **message: Any) -> None:
        """Tell the parent something, as worker 0."""
        if self.group.rank == 0:
            print(json.dumps(message), flush=True)

    def repeat(self, work: Callable[[], Any]) -> Times:
        """Seconds by the slowest worker: the first time is left out if it is short."""
        first = slowest(self.group, work)
        times, more = ([first], 1) if first >= LONG_S else ([], 5 if first < SHORT_S else 3)
        return times + [slowest(self.group, work) for _ in range(more)]

    def at_rates(self, what: str, work: Callable[[], float | None], warm_up: int = 0) -> Rows:
        """By rate: the times, the megabytes that this worker sent each time, and what `work` tells."""
        key = what.rpartition(" ")[2]
        found = Rows()
        for rate in self.task.rates:
            self.reshape(rate)
            for _ in range(warm_up):
                work()
            warm_up, told, sent = 0, list[float | None](), _sent_bytes()
            times = self.repeat(lambda told=told: told.append(work()))
            found[rate] = {key: times, "sent_mb": round((_sent_bytes() - sent) / len(told) / 1e6, 3)}
            self.tell(note=f"{rate}, {what}: {statistics.median(times):.3f} s")
            if waited := [each for each in told[-len(times) :] if each is not None]:
                found[rate]["waited_s"] = statistics.median(waited)
        return found

    def ring(self) -> dict[str, Times]:
        """Gb/s that each worker sends to the next, all at once."""
        found, group, behind = dict[str, Times](), self.group, self.group.size - 1
        for rate in self.task.rates:
            self.reshape(rate)
            gb_s = {"mbit": 1e-3, "gbit": 1.0}[rate[-4:]] * float(rate[:-4])
            out = torch.zeros(int(RING_S * gb_s * 1e9 / 8), dtype=torch.uint8)
            room = torch.empty_like(out)
            messages = Round([(group.others[behind - 1], room)], [(group.others[0], out)])
            times = self.repeat(lambda messages=messages: group.swap(messages, lambda: None, Round()))
            found[rate] = [8e-9 * len(out) / seconds for seconds in times]
        return found


class OwnSteps:
    """Steps and exchanges of Lockstep."""

    def __init__(self, worker: Worker) -> None:
        self._worker, self._task = worker, worker.task
        self.model = build_model(worker.task.run(1), SHAPE, CLASSES)
        self._lowered = LaneByLane(self.model, make_loss(Train()), 0, half=None)
        self._lanes = Lanes(worker.images, worker.labels, 1, worker.group.rank)
        self._grads = next(iter(self._lowered.run(self._lanes, 0))).grads[::-1]

    @contextmanager
    def step(self, group: Group, scheme: str = "none") -> Iterator[Callable[[], StepResult]]:
        """A whole step in a group; of one worker, its lane is all there is."""
        run = self._task.run(group.size, scheme)
        feedback = Feedback.of(run.train, self.model, group)
        state = TrainState.begin(self.model, run.optimizer, 0.0, feedback=feedback)
        step = Step(run, state, self._lowered, 10**6, plain_mesh(group))
        lanes = Lanes(self._lanes.images, self._lanes.labels, 1, group.rank)
        yield lambda: step(lanes)
        step.close()
        gc.collect()

    @contextmanager
    def exchange(self, group: Group, scheme: str) -> Iterator[Callable[[], None]]:
        """From gradients to their means; of one worker, what compressing takes."""
        params = {name: p.detach() for name, p in self.model.named_parameters()}
        feedback = Feedback.of(self._task.run(group.size, scheme).train, self.model, group)
        entries = [ReducedTensor(p, None, name) for name, p in reversed(params.items())]
        reducer = Reducer(group, group.size, entries, feedback=feedback)

        def work() -> None:
            reducer.begin()
            reducer.add(self._grads)
            reducer.finish()
            reducer.commit()

        yield work
        reducer.close()
        gc.collect()

    def measure(self, scheme: str) -> Rows:
        """A scheme's codec, exchanges and steps."""
        worker = self._worker
        with self.exchange(Group(), scheme) as work:
            codec_s = statistics.median(worker.repeat(work)) if scheme != "none" else 0.0
        with self.exchange(worker.group, scheme) as work:
            exchanges = worker.at_rates(f"{scheme} exchange", work)
        with self.step(worker.group, scheme) as step:
            steps = worker.at_rates(f"{scheme} step", lambda: step().exchange_s)
        return {rate: {**exchanges[rate], **row, "codec_s": codec_s} for rate, row in steps.items()}


def measure_ddp(worker: Worker, model: torch.nn.Module, hook: str) -> dict[str, Any]:
    """Steps of PyTorch's DDP with a hook; without one, of a worker by itself."""
    model = deepcopy(model)  # on whose parameters no other DDP has hooks
    trained: Any = make_ddp(model, hook) if hook else model
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        outputs = trained(worker.images)
        heads_loss(F.cross_entropy, outputs, worker.labels, getattr(model, "aux_weight", 0.0)).backward()
        optimizer.step()

    return worker.at_rates(f"{hook} step", step, START) if hook else {"step": worker.repeat(step)}


def _sent_bytes() -> int:
    """By this node's cable so far, TCP's own included."""
    return int(Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes").read_text())


def main() -> None:
    rank, told = int(sys.argv[1]), json.loads(sys.argv[2])
    task = Task(**{**told, "rates": tuple(told["rates"]), "schemes": tuple(told["schemes"])})
    worker = Worker(task, rank)
    found: dict[str, Any] = {"ring": worker.ring()}
    with plain_torch():
        prepare_device("cpu", 1)
        own = OwnSteps(worker)
        with own.step(Group()) as step:
            found["compute"] = worker.repeat(step)
        found |= {scheme: own.measure(scheme) for scheme in task.schemes if scheme not in HOOKS}
    if peers := [scheme for scheme in task.schemes if scheme in HOOKS]:
        store = dist.PrefixStore("ddp", worker.store)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=task.workers)
        found["peer compute"] = measure_ddp(worker, own.model, "")["step"]
        for hook in peers:
            found[hook] = measure_ddp(worker, own.model, hook)
            gc.collect()
        dist.destroy_process_group()
    worker.tell(found=found)
    worker.group.barrier()
    worker.group.close()


if __name__ == "__main__":
    main()
