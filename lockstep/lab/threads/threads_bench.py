"""Measures training by 1, 2, 4 … T threads of a GPU: a step of few images, and by many whole training."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.errors import LockstepError
from lockstep.lab.threads.cuda_network import CudaNetwork
from lockstep.lab.threads.grid_kernel import Load, load_on_gpu

STEP, TRAINING = "step of 8 images", "training"
STEP_IMAGES = 8
TRAINS_FROM = 1024  # threads: with fewer, whole training takes too long
_BATCH, _RATE, _MOMENTUM = 64, 0.02, 0.9


@dataclass(frozen=True)
class Scaled:
    """The same work done by a number of threads, or of workers."""

    kind: str
    count: int
    images: int  # trained on in one round
    seconds: tuple[float, ...]  # of each round
    loss: float
    accuracy: float | None  # after training
    weights_sha256: str


@dataclass(frozen=True)
class SkippedCount:
    """What was not measured, and why."""

    kind: str
    count: int
    why: str


@dataclass(frozen=True)
class Pictures:
    """Images [N, 1, H, W] in float32 on the device, and their classes."""

    images: Tensor
    labels: Tensor


@dataclass(frozen=True)
class ThreadWork:
    """What every number of threads is given: weights to start from, images, how much, and patience."""

    weights: Mapping[str, Tensor]
    train: Pictures
    test: Pictures
    steps: int
    epochs: int
    patience_s: float  # what would take longer is left out
    load: Load = load_on_gpu


def measure_threads(
    device: torch.device, counts: Sequence[int], work: ThreadWork
) -> Iterator[Scaled | SkippedCount]:
    """From the most threads down, since each half of them takes at most twice as long."""
    falling = sorted(counts, reverse=True)
    try:
        _step(device, falling[0], work)  # compiles and warms up
    except LockstepError as error:
        yield SkippedCount(STEP, falling[0], str(error).splitlines()[0])
        return
    for kind, measure, least in ((TRAINING, _train, TRAINS_FROM), (STEP, _step, 1)):
        expected_s = 0.0
        for count in falling:
            if count < least:
                continue
            if expected_s > work.patience_s:
                yield SkippedCount(kind, count, f"would take up to {expected_s:.0f} s")
                expected_s *= 2
                continue
            found = measure(device, count, work)
            expected_s = 2 * sum(found.seconds)
            yield found


def _step(device: torch.device, count: int, work: ThreadWork) -> Scaled:
    """The first steps from the same weights on the same images, each timed."""
    network = CudaNetwork(device, count, STEP_IMAGES, work.weights, momentum=_MOMENTUM, load=work.load)
    images, labels = work.train.images[:STEP_IMAGES], work.train.labels[:STEP_IMAGES].to(torch.int32)
    seconds, loss = list[float](), torch.zeros(())
    for _ in range(work.steps):
        start = _now(device)
        loss = network.step(images, labels, _RATE)
        seconds.append(_now(device) - start)
    return Scaled(STEP, count, len(images), tuple(seconds), float(loss), None, network.weights_sha256())


def _train(device: torch.device, count: int, work: ThreadWork) -> Scaled:
    """All epochs, timed as one; then the test images' accuracy and loss."""
    network = CudaNetwork(device, count, _BATCH, work.weights, momentum=_MOMENTUM, load=work.load)
    images, labels = work.train.images, work.train.labels.to(torch.int32)
    maker = torch.Generator().manual_seed(0)
    orders = [torch.randperm(len(images), generator=maker).to(device) for _ in range(work.epochs)]
    start = _now(device)
    for order in orders:
        for chosen in torch.split(order, _BATCH):
            network.step(images[chosen], labels[chosen], _RATE)
    seconds = _now(device) - start
    scores, truth = network.predict(work.test.images).cpu(), work.test.labels.cpu().long()
    accuracy = float((scores.argmax(1) == truth).float().mean())
    loss = float(torch.nn.functional.cross_entropy(scores.double(), truth))
    number = work.epochs * len(images)
    return Scaled(TRAINING, count, number, (seconds,), loss, accuracy, network.weights_sha256())


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
