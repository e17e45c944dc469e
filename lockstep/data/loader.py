"""The loader for steps through the host: reads a worker's lanes ahead, and moves them to the device.

Data pipeline: store → order → augment → loader. A thread reads the images of the next steps while the current
step computes, so decoding overlaps training. That changes no bit, because a sample depends only on its keys.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.data.augment import Augment
from lockstep.data.feeding import feeding
from lockstep.data.order import lane_positions
from lockstep.data.store import MemorySplit, Split
from lockstep.kernels.structure import map_tensors, place

_ORDERED = 4096  # samples whose numbers are found at once: to find a few takes as long


@dataclass(frozen=True)
class Lanes:
    """Consecutive lanes of one step, concatenated along dim 0, normalized and on the device."""

    images: Tensor  # [k · n, C, H, W]: k lanes of n samples
    labels: Any  # int64 [k · n]; or a structure of tensors [k · n, …], if targets are not class numbers
    num_lanes: int  # k
    first: int = 0  # number of the first lane, among all lanes of the step
    steps: int = 1  # whose parts each lane has, one after another: those of a round

    @property
    def numbers(self) -> range:
        """The numbers of these lanes among all lanes of the step."""
        return range(self.first, self.first + self.num_lanes)

    @property
    def lane_size(self) -> int:
        """Samples per lane."""
        return len(self.images) // self.num_lanes

    def lane(self, index: int) -> tuple[Tensor, Any]:
        """One lane's images and labels; 64-byte aligned, since BLAS may choose other kernels by alignment."""
        part = slice(index * self.lane_size, (index + 1) * self.lane_size)
        images = self.images[part]
        aligned = images if images.data_ptr() % 64 == 0 else images.clone()
        return aligned, map_tensors(lambda labels: labels[part], self.labels)

    def range(self, first: int, count: int) -> Lanes:
        """`count` lanes from lane `first` on, numbered among all lanes of the step."""
        begin = (first - self.first) * self.lane_size
        part = slice(begin, begin + count * self.lane_size)
        return Lanes(self.images[part], map_tensors(lambda labels: labels[part], self.labels), count, first)


@dataclass(frozen=True)
class Needs:
    """What a worker needs of its samples: of a pipeline, the first stage images, the last one labels."""

    images: bool = True
    labels: bool = True


class TrainLoader:
    """Yields a worker's own lanes of each step, and reads no others; `epoch` can start at any step."""

    def __init__(
        self,
        split: Split,
        augment: Augment,
        *,
        batch: int,
        lanes: int,
        own: range | None = None,
        device: torch.device,
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> None:
        self._memory_format, self.needs = memory_format, Needs()
        self.stages: Callable[[int], tuple[Split, Augment]] | None = None  # if both depend on the epoch
        self.at_once = 1  # batches that are taken together, and read together before
        self.waited_s = 0.0  # for batches that were not read yet when their step came
        self._split, self._augment, self._device = split, augment, device
        self._batch, self._lanes, self._own = batch, lanes, range(lanes) if own is None else own
        self._ordered = -1, range(0), torch.empty(0)  # an epoch, some steps of it, their samples

    def __len__(self) -> int:
        """Steps in an epoch; the samples after the last whole batch are dropped."""
        return len(self._split) // self._batch

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[Lanes]:
        """The steps of one epoch from `first_step` on."""
        steps = range(first_step, len(self))
        if self.stages:
            self._split, self._augment = self.stages(epoch)
        if isinstance(self._split, MemorySplit) and not self._augment.is_drawn_before:  # a gather in memory
            yield from (self._finish(epoch, step, *self._read(epoch, step)) for step in steps)
            return
        with ThreadPoolExecutor(1, "lockstep-read", self._choose_gpu) as pool, _interruptible(pool):
            ahead: deque[Future[tuple[Tensor, Tensor, Any]]] = deque()
            for step in steps:
                while len(ahead) < feeding().ahead + self.at_once and step + len(ahead) < len(self):
                    ahead.append(pool.submit(self._read, epoch, step + len(ahead)))
                clock = time.perf_counter()
                batch = ahead.popleft().result()
                self.waited_s += time.perf_counter() - clock
                yield self._finish(epoch, step, *batch)

    def _choose_gpu(self) -> None:
        """Move the prefetch thread from GPU 0 to the worker's GPU, on which a user's data set may compute."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)

    def _read(self, epoch: int, step: int) -> tuple[Tensor, Tensor, Any]:
        ids, augment, length = self._order(epoch, step), self._augment, len(self._split)
        if self.needs.images:
            images, targets = augment.read(self._split, ids, epoch)
            if self._device.type == "cpu":  # beside the step
                images = augment.change(images, ids, epoch)
            return ids, images, targets
        known = getattr(self._split, "labels", None)
        if not self.needs.labels:
            labels: Any = torch.zeros(len(ids), dtype=torch.int64)
        else:
            places = ids % length
            labels = known[places] if isinstance(known, Tensor) else self._split.read(places)[1]
        return ids, torch.zeros(len(ids), 0), labels

    def _order(self, epoch: int, step: int) -> Tensor:
        """The numbers of a step's samples; those of the next steps are found with them."""
        known, steps, ids = self._ordered  # at once, as another thread may read
        if epoch != known or step not in steps:
            first = lane_positions(0, self._batch, self._lanes)[self._own.start : self._own.stop].flatten()
            steps = range(step, min(step + _ORDERED // len(first) + 1, len(self)))
            positions = (torch.tensor(steps)[:, None] * self._batch + first).flatten()
            ids = self._augment.order(epoch, positions, len(self._split)).view(len(steps), -1)
            self._ordered = epoch, steps, ids
        return ids[step - steps.start]

    def _finish(self, epoch: int, step: int, ids: Tensor, images: Tensor, labels: Any) -> Lanes:
        images, labels = images.to(self._device), place(labels, self._device)
        if self.needs.images:
            if self._device.type != "cpu":
                images = self._augment.change(images, ids, epoch)
            images = self._augment.apply(images, ids.to(self._device), epoch)
        if mix := self._augment.mix:
            images, labels = mix.apply(images, labels, epoch, step, self._own)
        if self.needs.images:
            images = images.contiguous(memory_format=self._memory_format)
        return Lanes(images, labels, len(self._own), self._own.start)


@contextmanager
def _interruptible(pool: ThreadPoolExecutor) -> Iterator[None]:
    """A second Ctrl-C does not wait for a sample that may never come."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        pool.shutdown(wait=False, cancel_futures=True)
        raise


def eval_blocks(
    split: Split, augment: Augment, block: int, device: torch.device, own: range | None = None
) -> Iterator[tuple[Tensor, Any, int]]:
    """Yield blocks of `block` samples for evaluation: images, labels, and the number of real samples.

    The last block is padded. `own` selects blocks by number; the default is all of them.
    """
    for number in range(-(-len(split) // block)) if own is None else own:
        first = number * block
        ids = torch.arange(first, min(first + block, len(split)))
        real = len(ids)
        images, labels = split.read(torch.cat([ids, ids[-1:].expand(block - real)]))
        yield augment.normalize(images.to(device)), place(labels, device), real
