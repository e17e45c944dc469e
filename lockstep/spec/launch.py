"""A Launch: where and how a run is started; nothing in it may change a bit of the result."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import SpecError, unknown
from lockstep.spec.run import Run
from lockstep.spec.world import World

DEVICES = ("auto", "cpu", "cuda")
BACKENDS = ("auto", "gloo", "nccl", "mpi")


@dataclass(frozen=True)
class Launch:
    """The run's directory, what it continues, and the devices and workers it runs on."""

    name: str | None = None
    runs_dir: Path = Path("runs")
    resume: str | None = None  # "auto", a run, or a checkpoint
    fork: str | None = None
    device: str = "auto"
    tensorboard: bool = False
    workers: int | str | None = None  # "auto", or how many; None: as launched, else one
    backend: str = "auto"
    bucket_mb: float = 25.0
    overlap: bool = True
    trace: bool = False
    world: World | None = None  # what the environment says, if a launcher started this process

    def __post_init__(self) -> None:
        if self.device not in DEVICES:
            raise SpecError(f"--device: {unknown('device', self.device, DEVICES)}")
        if self.backend not in BACKENDS:
            raise SpecError(f"--backend: {unknown('backend', self.backend, BACKENDS)}")
        if self.resume and self.fork:
            raise SpecError(
                f"--resume {self.resume} and --fork {self.fork} exclude each other: "
                "resume goes on with a run, fork starts a new one from its weights"
            )
        name = self.name
        if name is not None and (not name.strip(".") or set(name) & set("/\\") or not name.isprintable()):
            raise SpecError(
                f"--name '{self.name}' must be the name of a folder, of printable characters without slashes"
            )
        workers = self.workers
        if workers not in (None, "auto") and (type(workers) is not int or workers < 1):
            raise SpecError(
                f"--workers {workers} must be a whole number from 1, or auto: one per GPU, else one per core"
            )
        if not 0 < self.bucket_mb <= 4096:
            raise SpecError(f"--bucket-mb {self.bucket_mb:g} must be above 0 and at most 4096")

    @property
    def rank(self) -> int:
        return self.world.rank if self.world else 0

    def resume_command(self, run: Path) -> str:
        """What to type to go on with a run that was launched so."""
        if self.world and self.world.launcher != "lockstep":
            return "the same command and --resume auto"
        workers = f" --workers {self.world.size}" if self.world else ""
        device = f" --device {self.device}" if self.device != "auto" else ""
        return f"`lockstep train --resume {run}{workers}{device}`"

    def check_workers(self, run: Run) -> None:
        """Refuse numbers of workers that contradict each other or the run."""
        world, workers, lanes = self.world, self.workers, run.train.lanes
        if world and workers not in (None, "auto", world.size):
            raise SpecError(
                f"--workers {workers}, but {world.launcher} started {world.size} and keeps them to the end "
                "of the script: leave --workers out"
            )
        size = world.size if world else workers
        if isinstance(size, int) and size > lanes:
            raise SpecError(
                f"{size} workers are more than train.lanes={lanes}: every worker needs a lane of its own; "
                f"use at most {lanes} workers, or more lanes (a power of two), which is another run"
            )
        if self.backend == "mpi" and (world is None or world.launcher != "mpirun"):
            raise SpecError("--backend mpi needs mpirun: mpirun -n N lockstep train … --backend mpi")
