"""A Launch: where and how a run is started; nothing in it may change a bit of the result."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import SpecError, unknown

DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True)
class Launch:
    """The run's directory, what it continues, and the device it runs on."""

    name: str | None = None
    runs_dir: Path = Path("runs")
    resume: str | None = None  # "auto", a run, or a checkpoint
    fork: str | None = None
    device: str = "auto"
    tensorboard: bool = False

    def __post_init__(self) -> None:
        if self.device not in DEVICES:
            raise SpecError(f"--device: {unknown('device', self.device, DEVICES)}")
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
