"""Images for steps on the device: all in its memory, or batches that are read ahead.

A batch's path: store → order → here → augment → layer. Data that does not fit on the device is read ahead on
the host, put into pinned memory and sent on a CUDA stream of its own during the previous step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from lockstep.comm.background import BackgroundThread
from lockstep.data.augment import Augment
from lockstep.data.feeding import feeding
from lockstep.data.images.encoded_split import EncodedSplit
from lockstep.data.store import MemorySplit, Split

_MOST = 0.5  # the share of the device's free memory that images may take
_LABEL, _ALIGN = 8, 16  # bytes: of a label; a row (an image and its label) is a multiple of this
_Batch = tuple[Tensor, Tensor]


class Images(Protocol):
    """Images and labels on the device, and the places of each step's samples among them."""

    images: Tensor
    labels: Tensor
    places: Tensor  # [steps, samples of a step]
    ahead: int  # how many steps may be started at a time
    waited_s: float  # how long steps waited for their images so far

    def begin_epoch(self, first: int, epoch: int = 0) -> None:
        """Start an epoch at step `first`; `order` is filled by now."""

    def feed(self, step: int) -> None:
        """Provide the images of a step that is about to be started."""

    def close(self) -> None:
        """Stop reading ahead."""


def place_images(split: Split, order: Tensor, device: torch.device, augment: Augment | None = None) -> Images:
    """All images on the device if they fit, else two batches; `order` [steps, samples] is filled later.

    With `augment` they are for training.
    """
    if not (augment and augment.is_drawn_before):
        if isinstance(split, EncodedSplit) and split.is_kept:
            split = split.in_memory()
        if isinstance(split, MemorySplit) and fits(split, device):
            return ResidentImages(split, order, device, bool(augment and augment.repeats_samples))
    return PrefetchedImages(split, order, device, augment)


def fits(split: MemorySplit, device: torch.device) -> bool:
    """Whether a split can lie on the device beside the step."""
    if device.type != "cuda":
        return True
    torch.cuda.empty_cache()  # which an earlier generation may have filled
    free, _ = torch.cuda.mem_get_info(device)
    return split.images.numel() * split.images.element_size() <= free * _MOST


class ResidentImages:
    """All images on the device; a sample's place is its number, whichever repetition it is."""

    ahead = 8
    waited_s = 0.0

    def __init__(
        self, split: MemorySplit, order: Tensor, device: torch.device, repeats: bool = False
    ) -> None:
        self.images, self.labels = split.images.contiguous().to(device), split.labels.to(device)
        self._order, self.places = order, torch.zeros_like(order) if repeats else order

    def begin_epoch(self, first: int, epoch: int = 0) -> None:
        """Find the places of repeated samples, whose numbers are beyond the images."""
        if self.places is not self._order:
            torch.remainder(self._order, len(self.labels), out=self.places)

    def feed(self, step: int) -> None:
        """Nothing to do: all images are on the device."""

    def close(self) -> None:
        """Nothing to do: nothing reads ahead."""


class PrefetchedImages:
    """Two buffers of one batch each, filled in turn; an image and its label are one row, a batch one copy."""

    ahead = 1  # the next batch may take long to read, and earlier results should not wait for it

    def __init__(
        self,
        split: Split,
        order: Tensor,
        device: torch.device,
        augment: Augment | None = None,
    ) -> None:
        self._split, self._order, self._augment = split, order, augment
        steps, count = order.shape
        self._like = split.read(torch.zeros(1, dtype=torch.int64))[0]
        row, pinned = -(-(self._like.nbytes + _LABEL) // _ALIGN) * _ALIGN, device.type == "cuda"
        self._pinned = torch.zeros(2, count, row, dtype=torch.uint8, pin_memory=pinned)
        self._there = torch.zeros_like(self._pinned, device=device)
        self.images, self.labels = self._parts(self._there.flatten(0, 1))
        self.places = (torch.arange(steps)[:, None] % 2 * count + torch.arange(count)).to(device)
        self._background: BackgroundThread[_Batch] = BackgroundThread("feed", device)
        self._ahead: deque[Future[_Batch]] = deque()
        self._side = _Side(device) if pinned else None
        self.waited_s = 0.0

    def begin_epoch(self, first: int, epoch: int = 0) -> None:
        """Start an epoch at step `first`; `order` is filled by now."""
        self._rest()
        self._ids = self._order.cpu()  # waits for all started steps, so both buffers are free
        self._epoch, self._next = epoch, first
        self._read()

    def feed(self, step: int) -> None:
        """Provide the images of a step that is about to be started."""
        batch, half = self._wait(step), step % 2
        self._read()
        ids = self._ids[step]
        if self._side:
            self._side.wait_for_copy(half)
        for tensor, pinned in zip(batch, self._parts(self._pinned[half]), strict=True):
            pinned.copy_(tensor)
        if self._side:
            self._side.copy(half, self._there, self._pinned, partial(self._change, half, ids))
        else:
            self._there[half].copy_(self._pinned[half])
            self._change(half, ids)

    def _change(self, half: int, ids: Tensor) -> None:
        """Change colours, geometry and regions of a batch that lies on the device."""
        if self._augment and self._augment.changes:
            images = self._parts(self._there[half])[0]
            images.copy_(self._augment.change(images, ids, self._epoch))

    def _wait(self, step: int) -> _Batch:
        """The batch that was read ahead; on a GPU only the GPU's idle time counts as waiting."""
        batch_ahead = self._ahead.popleft()  # steps come in order
        if self._side:
            self.waited_s += self._side.end_step(step % 2)
            return batch_ahead.result()
        clock = time.perf_counter()
        batch = batch_ahead.result()
        self.waited_s += time.perf_counter() - clock
        return batch

    def close(self) -> None:
        """Stop reading ahead, so that others may read."""
        self._rest()
        self._background.close()

    def _parts(self, rows: Tensor) -> _Batch:
        """Views of the images and labels in some rows."""
        like = self._like
        images = rows[:, : like.nbytes].view(like.dtype).view(-1, *like.shape[1:])
        return images, rows.view(torch.int64)[:, -1]

    def _rest(self) -> None:
        """Wait until nothing is being read; what was read is dropped."""
        wait(self._ahead)
        self._ahead.clear()

    def _read(self) -> None:
        """Let the background read up to the given number of steps ahead."""
        while len(self._ahead) < feeding().ahead and self._next < len(self._ids):
            ids, epoch = self._ids[self._next], self._epoch
            self._ahead.append(self._background.submit(partial(self._read_batch, ids, epoch)))
            self._next += 1

    def _read_batch(self, ids: Tensor, epoch: int) -> _Batch:
        return self._augment.read(self._split, ids, epoch) if self._augment else self._split.read(ids)


class _Side:
    """A CUDA stream for copies, and the events for which copies and steps wait."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._copied = [torch.cuda.Event(blocking=True) for _ in range(2)]  # type: ignore[no-untyped-call]
        self._used = torch.cuda.Event()  # type: ignore[no-untyped-call]
        timed = [torch.cuda.Event(enable_timing=True) for _ in range(4)]  # type: ignore[no-untyped-call]
        self._ended, self._begun = timed[:2], timed[2:]  # end of the step before, start of the next one
        self._is_timed = [False, False]

    def end_step(self, half: int) -> float:
        """Mark the end of the last step; returns how long the GPU was idle before the step before last."""
        idle_s = 0.0
        if self._is_timed[half]:
            self._begun[half].synchronize()  # recorded two steps ago, so it hardly waits
            idle_s = self._ended[half].elapsed_time(self._begun[half]) / 1000
        self._ended[half].record(torch.cuda.current_stream(self._device))
        self._is_timed[half] = True
        return idle_s

    def wait_for_copy(self, half: int) -> None:
        """Block the host until the pinned buffer may be written again."""
        self._copied[half].synchronize()

    def copy(self, half: int, there: Tensor, pinned: Tensor, change: Callable[[], None]) -> None:
        """Send and change a batch once the step that last used its buffer is done; the next one waits."""
        self._stream.wait_event(self._used)  # recorded after the last step that used this buffer
        with torch.cuda.stream(self._stream):
            there[half].copy_(pinned[half], non_blocking=True)
            self._copied[half].record(self._stream)
            change()
        current = torch.cuda.current_stream(self._device)
        self._used.record(current)
        current.wait_stream(self._stream)
        self._begun[half].record(current)
