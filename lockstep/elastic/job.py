"""A Job: what a launcher is to run, as the command line or a script asks for it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Job:
    """The number of workers on this node, and the settings of the job they belong to."""

    workers: int
    lanes: int
    sizes: tuple[int, ...] = ()  # the only numbers of workers that can train, the most wanted first; or any
    is_split: bool = False  # whether workers may have parts of the state, so that they cannot save it alone
    min_workers: int = 1
    wait_s: float = 60.0
    restarts: int = 3
    rdzv: tuple[str, int] | None = None
    nodes: tuple[int, int] = (1, 1)
    token: str = ""
    tls: Path | None = None  # the folder of certificates, if launchers talk by TLS
    advice: str = "; the same command with --resume auto goes on"
    tells_losses: bool = False  # whether the launcher tells of lost workers; in a training, worker 0 does
    preload: str = "torch"  # the module that the fork server imports for all workers
    is_elastic: bool = True  # whether the other workers go on when one is lost
