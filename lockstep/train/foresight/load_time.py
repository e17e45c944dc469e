"""Seconds that a run's loader takes to bring images to the device, read and augmented as in training."""

from __future__ import annotations

import statistics
import time
from collections.abc import Generator
from contextlib import closing
from itertools import count

import torch

from lockstep.data.loader import Lanes, TrainLoader
from lockstep.spec.profile import LoadTime
from lockstep.train.setup import Setup

_LEAST, _MOST, _BUDGET_S = 5, 100, 0.5  # batches whose median counts; more than the least within a budget


def time_loading(setup: Setup, images: int) -> LoadTime:
    """For so many images at once; a smaller data set is read whole, and its seconds are scaled."""
    batch = min(images, len(setup.store.train))
    loader = TrainLoader(
        setup.store.train,
        setup.augment(),
        batch=batch,
        lanes=1,
        device=setup.device,
        memory_format=setup.memory_format,
    )
    times, begin = list[float](), time.perf_counter()
    with closing(_batches(loader, images)) as batches:
        next(batches)  # starts the threads that read
        last = time.perf_counter()
        while len(times) < _LEAST or (len(times) < _MOST and last - begin < _BUDGET_S):
            next(batches)
            if setup.device.type == "cuda":
                torch.cuda.synchronize(setup.device)
            now = time.perf_counter()
            times.append(now - last)
            last = now
    return LoadTime(images, statistics.median(times) * images / batch)


def _batches(loader: TrainLoader, first: int) -> Generator[Lanes, None, None]:
    """Epoch after epoch; each begins with other images."""
    for epoch in count(first):
        yield from loader.epoch(epoch)
