"""A Job: what a launcher is to run, as the command line or a script asks for it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Job:
    """How many workers are to run here, and of which job they are."""

    workers: int
    lanes: int
    min_workers: int = 1
    wait_s: float = 60.0
    restarts: int = 3
    rdzv: tuple[str, int] | None = None
    nodes: tuple[int, int] = (1, 1)
    token: str = ""
    advice: str = "; --resume auto goes on"
    preload: str = "torch"  # what workers import
    is_elastic: bool = True  # whether the others go on without a worker that is lost
