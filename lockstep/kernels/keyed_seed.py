"""Seeds every generator that code usually draws from, by keys: torch's, Python's `random` and numpy's.

So what a sample's augmentation or a lane's forward pass draws depends on the keys alone: not on the worker,
nor on what was drawn before.
"""

from __future__ import annotations

import random as python_random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lockstep.kernels import random
from lockstep.kernels.numerics import seed_stream


def seed_all(device: torch.device, *parts: int | str) -> None:
    """Seed the generators of torch (on the CPU and on `device`), of `random` and of numpy, if it is there."""
    key = random.key(*parts)
    torch.default_generator.manual_seed(key)
    if device.type == "cuda":
        seed_stream(device, key)
    python_random.seed(key)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(key & 0xFFFF_FFFF)


@contextmanager
def generators_kept(device: torch.device) -> Iterator[None]:
    """Leave the generators that `seed_all` seeds as they were."""
    python, numpy = python_random.getstate(), sys.modules.get("numpy")
    state = numpy.random.get_state() if numpy else None
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        python_random.setstate(python)
        if numpy:
            numpy.random.set_state(state)
