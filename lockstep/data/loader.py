"""The loader: reads a worker's lanes of each step on the host, one step ahead, and moves them to the device.

A batch's way: store → order → augment → loader → step. The next step's images are read by a thread
while this one computes, so decoding files overlaps training; reading ahead changes no bit, because
every sample depends on its keys alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.data.augment import Augment
from lockstep.data.order import lane_positions, sample_ids
from lockstep.data.store import MemorySplit, Split


@dataclass(frozen=True)
class Lanes:
    """Lanes of one step, one after another along dim 0, normalized and on the device."""

    images: Tensor  # [k · n, C, H, W]
    labels: Tensor  # [k · n]
    num_lanes: int  # k
    first: int = 0  # the number of the first one among all lanes of the step

    @property
    def numbers(self) -> range:
        """The numbers of these lanes among all lanes of the step."""
        return range(self.first, self.first + self.num_lanes)

    def lane(self, index: int) -> tuple[Tensor, Tensor]:
        """One lane's images and labels; aligned as if it were alone, since BLAS may look at addresses."""
        size = len(self.labels) // self.num_lanes
        part = slice(index * size, (index + 1) * size)
        images = self.images[part]
        return (images if images.data_ptr() % 64 == 0 else images.clone()), self.labels[part]

    def range(self, first: int, count: int) -> Lanes:
        """Some neighbouring lanes, by their numbers among all lanes of the step."""
        size = len(self.labels) // self.num_lanes
        part = slice((first - self.first) * size, (first - self.first + count) * size)
        return Lanes(self.images[part], self.labels[part], count, first)


class TrainLoader:
    """Gives a worker's lanes of each step from a cursor (epoch, step in the epoch) on; it reads no others."""

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
        self._memory_format = memory_format
        self._split, self._augment, self._device = split, augment, device
        self._batch, self._lanes, self._own = batch, lanes, range(lanes) if own is None else own

    def __len__(self) -> int:
        """Steps in an epoch; the positions past the last whole batch are dropped."""
        return len(self._split) // self._batch

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[Lanes]:
        """The steps of one epoch from `first_step` on."""
        steps = range(first_step, len(self))
        if isinstance(self._split, MemorySplit):  # a gather in memory is not worth a thread
            yield from (self._finish(epoch, *self._read(epoch, step)) for step in steps)
            return
        with ThreadPoolExecutor(1, "lockstep-read", self._choose_gpu) as pool:
            ahead: Future[tuple[Tensor, Tensor, Tensor]] | None = None
            for step in steps:
                raw = ahead.result() if ahead else self._read(epoch, step)
                ahead = pool.submit(self._read, epoch, step + 1) if step + 1 < len(self) else None
                yield self._finish(epoch, *raw)

    def _choose_gpu(self) -> None:
        """In the thread that reads, which begins on GPU 0: data of the user's may compute."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)

    def _read(self, epoch: int, step: int) -> tuple[Tensor, Tensor, Tensor]:
        every = lane_positions(step, self._batch, self._lanes)
        positions = every[self._own.start : self._own.stop].flatten()
        ids = sample_ids(self._augment.seed, epoch, positions, len(self._split))
        return ids, *self._split.read(ids)

    def _finish(self, epoch: int, ids: Tensor, images: Tensor, labels: Tensor) -> Lanes:
        images = self._augment.apply(images.to(self._device), ids.to(self._device), epoch)
        images = images.contiguous(memory_format=self._memory_format)
        return Lanes(images, labels.to(self._device), len(self._own), self._own.start)


def eval_blocks(
    split: Split, augment: Augment, block: int, device: torch.device, own: range | None = None
) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Blocks of `block` samples, all or the `own`: images, labels, how many are real; the last is padded."""
    for number in range(-(-len(split) // block)) if own is None else own:
        first = number * block
        ids = torch.arange(first, min(first + block, len(split)))
        real = len(ids)
        images, labels = split.read(torch.cat([ids, ids[-1:].expand(block - real)]))
        yield augment.normalize(images.to(device)), labels.to(device), real
