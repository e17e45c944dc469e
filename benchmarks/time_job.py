"""The process that times one way to train: its settings, memory and failures stay in here.

gpu_step.py → timing.py → this program → a peer's step, again and again → seconds a step.
torch is not imported before a peer asks for it: JAX brings its own libraries of the same names.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import math
import sys
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from case import Case, Job

WARMUP_STEPS = 10
ROUND_S = 0.25  # what a round aims at, so that it lasts 0.2 s even if the steps before it were slower
PACKAGES = ("torch", "triton", "jax", "jaxlib", "flax", "optax", "lightning")


@dataclass
class Clock:
    """CUDA events for torch on a GPU; else the host's clock around work that is waited for.

    `turns` asks for one step by every yield, and is sent the loss that the step left on the device.
    """

    with_events: bool
    whole: int = 1  # steps that are only timed together: this engine starts some ahead, but no epoch
    seconds: list[float] = field(default_factory=list)  # of a step, one value a round
    num_steps: int = 0
    loss: Any = None

    def turns(self, rounds: int) -> Generator[None, Any, None]:
        yield from self._region(self._up(WARMUP_STEPS))
        step_s = yield from self._region(self._up(WARMUP_STEPS))
        self.num_steps = self._up(max(2, math.ceil(ROUND_S / step_s)))
        for _ in range(rounds):
            seconds = yield from self._region(self.num_steps)
            self.seconds.append(seconds)

    def _up(self, num_steps: int) -> int:
        return -(-num_steps // self.whole) * self.whole

    def _region(self, num_steps: int) -> Generator[None, Any, float]:
        if self.with_events:
            import torch

            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            begin.record()
        start = time.perf_counter()
        for _ in range(num_steps):
            self.loss = yield
        if self.with_events:
            end.record()
            torch.cuda.synchronize()
            return begin.elapsed_time(end) / 1e3 / num_steps
        if hasattr(self.loss, "block_until_ready"):
            self.loss.block_until_ready()
        return (time.perf_counter() - start) / num_steps


def main() -> None:
    """The process of one job."""
    table = json.loads(sys.argv[1])
    job = Job(**{**table, "case": Case(**table["case"])})
    try:
        result = time_here(job)
    except Exception as error:
        import traceback

        traceback.print_exc()
        message = " ".join(str(error).split())
        result = {"reason": f"{type(error).__name__}: {message}"[:300]}
    Path(sys.argv[2]).write_text(json.dumps(result))


def time_here(job: Job) -> dict[str, Any]:
    """Build the step and time it."""
    whole = job.case.num_batches if job.variant == "lockstep" and job.kernels != "stock" else 1
    clock = Clock(with_events=job.device == "cuda" and job.variant != "jax", whole=whole)
    turns = clock.turns(job.rounds)
    if job.variant == "lightning":  # the Trainer has a loop of its own
        from peers import run_lightning

        run_lightning(job.case, job.device, turns)
    else:
        step = make_step(job)
        next(turns)
        with contextlib.suppress(StopIteration):
            while True:
                turns.send(step())
    loss = float(clock.loss)
    if not math.isfinite(loss):
        raise FloatingPointError(f"the loss is {loss}")
    return {
        "seconds": clock.seconds,
        "steps_per_round": clock.num_steps,
        "loss": round(loss, 4),
        "peak_mib": round(peak_bytes(job) / 2**20, 1),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES if name in sys.modules},
    }


def make_step(job: Job) -> Callable[[], Any]:
    """The step of a variant."""
    if job.variant == "lockstep":
        from own_step import lockstep_step

        return lockstep_step(job.case, job.lanes, job.kernels)
    if job.variant == "jax":
        from flax_peer import jax_step

        return jax_step(job.case, job.device)
    from peers import PEERS

    return PEERS[job.variant](job.case, job.device)


def peak_bytes(job: Job) -> int:
    """The most GPU memory that tensors held; 0 on a CPU."""
    if job.variant == "jax":
        import jax

        return int((jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0))
    import torch

    return torch.cuda.max_memory_allocated() if job.device == "cuda" else 0


if __name__ == "__main__":
    main()
