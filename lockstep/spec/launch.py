"""A Launch: where and how a run is started: workers, device, backend, directory; not part of its identity."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from lockstep.errors import SpecError, unknown
from lockstep.spec.plan import Plan, read_plan
from lockstep.spec.plan_check import check_plans, explain_lanes
from lockstep.spec.prediction import read_prediction
from lockstep.spec.run import Run
from lockstep.spec.start.meeting import check_meeting, read_endpoint, read_nodes
from lockstep.spec.world import World

DEVICES = ("auto", "cpu", "cuda")
BACKENDS = ("auto", "gloo", "nccl", "mpi")
TRACKERS = ("tensorboard", "wandb", "mlflow")
RESTART_CODE = 75  # the exit code of a worker that wants to be restarted


@dataclass(frozen=True)
class Launch:
    """The run's directory, the run it continues, and the devices and workers it runs on."""

    name: str | None = None
    runs_dir: Path = Path("runs")
    resume: str | None = None  # "auto", a run, or a checkpoint
    fork: str | None = None
    device: str = "auto"
    track: tuple[str, ...] = ()  # who else gets the run's measurements: names of TRACKERS
    workers: int | str | None = None  # "auto" or a number; None: as many as were launched, else one
    backend: str = "auto"
    bucket_mb: float = 25.0
    overlap: bool = True
    decode_threads: int = 0  # of a worker, that decode images; 0: the machine's cores, among its workers
    data_processes: int = 0  # of a worker, that read a data set in Python; 0: the worker reads it itself
    pixel_cache: Path | None = None  # a folder on a local disk for decoded, resized pixels
    pixel_cache_gb: float = 10.0  # the most that they may take there
    read_ahead: int = 2  # steps whose images are read before they are needed
    graph: bool = True  # on a GPU, run steps and evaluation as CUDA graphs if possible
    trace: bool = False
    min_workers: int = 1
    wait_s: float = 60.0  # how long to wait for more workers, if there are fewer than min_workers
    restarts: int = 3  # how many lost workers a launcher replaces within an hour
    rdzv: str | None = None  # host:port of the launcher that holds the job's store
    nodes: str = "1"  # how many launchers: N, or MIN:MAX
    tls: Path | None = None  # the folder of the certificates by which launchers know each other
    data_changed: bool = False  # resume although the data has changed; from there on it is another run
    copy_every: int = 100  # steps between copies of what only one worker has, with compression; 0: none
    audit: int = 0  # check a lane and a slice by computing them twice, every N steps; 0: never
    stop_after_epochs: int = 0  # save and stop once so many epochs are trained; 0: at the end
    dry_run: bool = False  # do the first steps in memory, tell what they took, and write nothing
    quiet: bool = False  # print only warnings; a listener still gets every event
    plan: Plan = field(default_factory=Plan)  # how the model is dealt to workers
    fallbacks: tuple[Plan, ...] = ()  # plans for fewer workers, the first that comes out
    predicted: Mapping[str, float | str] = field(default_factory=dict)  # of a step, by the planner
    world: World | None = None  # from the environment, if a launcher started this process

    def __post_init__(self) -> None:
        object.__setattr__(self, "runs_dir", Path(self.runs_dir))  # users may give text
        if self.pixel_cache is not None:
            object.__setattr__(self, "pixel_cache", Path(self.pixel_cache))
        if self.tls is not None:
            object.__setattr__(self, "tls", Path(self.tls))
        if isinstance(self.plan, str):
            object.__setattr__(self, "predicted", read_prediction(self.plan))
            object.__setattr__(self, "plan", read_plan(self.plan))
        fallbacks = [read_plan(plan) if isinstance(plan, str) else plan for plan in self.fallbacks]
        object.__setattr__(self, "fallbacks", tuple(fallbacks))
        track = (self.track,) if isinstance(self.track, str) else self.track
        object.__setattr__(self, "track", tuple(dict.fromkeys(track)))
        if self.device not in DEVICES:
            raise SpecError(f"--device: {unknown('device', self.device, DEVICES)}")
        if self.backend not in BACKENDS:
            raise SpecError(f"--backend: {unknown('backend', self.backend, BACKENDS)}")
        new = f"--fork {self.fork}" if self.fork else "--dry-run" if self.dry_run else ""
        if self.resume and new:
            raise SpecError(f"--resume {self.resume} and {new} exclude each other: leave one of them out")
        if self.data_changed and not self.resume:
            raise SpecError("--data-changed needs --resume: it lets a run go on with data that was repaired")
        for tracker in self.track:
            if tracker not in TRACKERS:
                raise SpecError(f"--track: {unknown('tracker', tracker, TRACKERS)}")
        name, workers = self.name, self.workers
        if name is not None and (not name.strip(".") or set(name) & set("/\\") or not name.isprintable()):
            raise SpecError(
                f"--name '{self.name}' must be the name of a folder, of printable characters without slashes"
            )
        if workers not in (None, "auto") and (type(workers) is not int or workers < 1):
            raise SpecError(
                f"--workers {workers} must be a whole number from 1, or auto: one per GPU, else one per core"
            )
        if not 0 < self.bucket_mb <= 4096:
            raise SpecError(f"--bucket-mb {self.bucket_mb:g} must be above 0 and at most 4096")
        self._check_elastic()

    def _check_elastic(self) -> None:
        for flag, value, least in (
            ("--min-workers", self.min_workers, 1),
            ("--restarts", self.restarts, 0),
            ("--copy-every", self.copy_every, 0),
            ("--audit", self.audit, 0),
            ("--stop-after-epochs", self.stop_after_epochs, 0),
            ("--decode-threads", self.decode_threads, 0),
            ("--read-ahead", self.read_ahead, 1),
            ("data_processes", self.data_processes, 0),
        ):
            if type(value) is not int or value < least:
                raise SpecError(f"{flag} {value} must be a whole number from {least}")
        if not 0 < self.pixel_cache_gb <= 1e6:
            raise SpecError(f"--pixel-cache-gb {self.pixel_cache_gb:g} must be above 0, at most 1e6")
        if not 0 <= self.wait_s <= 1e6:
            raise SpecError(f"--wait {self.wait_s:g} must be a number of seconds from 0")
        check_meeting(self.rdzv, self.nodes, self.tls)

    @property
    def rank(self) -> int:
        return self.world.rank if self.world else 0

    @property
    def num_nodes(self) -> tuple[int, int]:
        """The smallest and the largest number of launchers in the job."""
        return read_nodes(self.nodes)

    @property
    def endpoint(self) -> tuple[str, int]:
        """Host and port at which the launchers of several nodes meet."""
        return read_endpoint(self.rdzv)

    def resume_command(self, run: Path) -> str:
        """The command that resumes a run with the same flags."""
        if self.world and self.world.launcher != "lockstep":
            return "the same command and --resume auto"
        plain = Launch()
        flags = {
            "--workers": self.world.size if self.world else None,
            "--device": self.device if self.device != plain.device else None,
            "--min-workers": self.min_workers if self.min_workers != plain.min_workers else None,
            "--wait": f"{self.wait_s:g}" if self.wait_s != plain.wait_s else None,
            "--restarts": self.restarts if self.restarts != plain.restarts else None,
            "--copy-every": self.copy_every if self.copy_every != plain.copy_every else None,
            "--rdzv": self.rdzv,
            "--nodes": self.nodes if self.nodes != plain.nodes else None,
            "--tls": self.tls,
            "--audit": self.audit or None,
            "--track": " --track ".join(self.track) or None,
            "--plan": self.plan if self.plan != plain.plan else None,
            "--or": " --or ".join(map(str, self.fallbacks)) or None,
        }
        words = "".join(f" {flag} {value}" for flag, value in flags.items() if value is not None)
        return f"`lockstep train --resume {run}{words}`"

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plan, and those to fall back to."""
        return self.plan, *self.fallbacks

    def splits_state(self, run: Run) -> bool:
        """Whether a worker has only a part of the state: by a plan, or of what compression leaves out."""
        return any(plan.splits_state for plan in self.plans) or run.train.compress != "none"

    @property
    def is_bound(self) -> bool:
        """Whether only some numbers of workers have a plan; else any number that is left goes on."""
        return bool(self.fallbacks) or self.plan.splits

    def plan_for(self, workers: int, lanes: int) -> Plan:
        """The first plan that comes out for so many workers and lanes, with its number along `data`."""
        if not self.is_bound:
            return self.plan
        return next((p for p in self.plans if p.fits(workers, lanes)), self.plan).for_workers(workers)

    def sizes(self, most: int, lanes: int) -> tuple[int, ...]:
        """The numbers of workers up to `most` that have a plan, the most wanted first; empty if all have."""
        if not self.is_bound:
            return ()
        found = (n for plan in self.plans for n in range(most, 0, -1) if plan.fits(n, lanes))
        return tuple(dict.fromkeys(found))

    @property
    def num_workers(self) -> int | str | None:
        """The number of workers to start: as given, else as the plan says."""
        least = self.plan.workers or (self.plan.least if self.plan.splits else None)
        return least if self.workers is None else self.workers

    def _check_plan(self, run: Run, size: int | str | None) -> None:
        if isinstance(size, int) and not self.rdzv:  # else it is the number on one node
            self.plan.for_workers(size)
        check_plans(self.plans, run, size)
        splitting = [plan for plan in self.plans if plan.splits]
        for flag, value in (("--audit", self.audit), ("--trace", self.trace)):
            if value and splitting:
                raise SpecError(
                    f"{flag} needs the whole state and whole layers, and the plan {splitting[0]} splits "
                    f"them: leave {flag} out"
                )
        if self.backend == "mpi" and splitting:
            raise SpecError(
                f"--backend mpi has no groups of some workers, and the plan {splitting[0]} needs them: leave "
                "--backend out, also under mpirun"
            )

    def _check_mpi(self) -> None:
        if self.backend == "mpi" and (self.world is None or self.world.launcher != "mpirun"):
            raise SpecError("--backend mpi needs mpirun: mpirun -n N lockstep … --backend mpi")

    def for_users(self, world: World | None, count: int) -> Launch:
        """The same for workers of a trained run, of which `count` would be started, with their plan."""
        if world and self.workers not in (None, "auto", world.size):
            started = f"{world.launcher} started {world.size}"
            raise SpecError(f"--workers {self.workers}, but {started}: leave it out")
        size = world.size if world else count if self.workers != "auto" else self.plan.most(count) or count
        found = replace(self, world=world, plan=self.plan.for_workers(size))
        found._check_mpi()
        return found

    def check_run(self, run: Run) -> None:
        """Refuse settings that contradict each other or the run."""
        world, workers, lanes = self.world, self.workers, run.train.lanes
        if world and workers not in (None, "auto", world.size):
            raise SpecError(
                f"--workers {workers}, but {world.launcher} started {world.size} and keeps them to the end "
                "of the script: leave --workers out"
            )
        size, most = world.size if world else self.num_workers, lanes * self.plan.least
        what = explain_lanes(self.plan, run)
        if isinstance(size, int) and size > most:
            raise SpecError(
                f"{size} workers are more than {what}: every worker needs a lane of its own; "
                f"use at most {most} workers, or more lanes (a power of two), which is another run"
            )
        self._check_plan(run, size)
        alone = "sync_norm=true its batch norms need all lanes" if run.train.sync_norm else ""
        if run.train.local_steps > 1:
            alone = f"local_steps={run.train.local_steps} a lane has weights of its own"
        if self.audit and alone:
            again = "--audit computes a lane a second time by itself, and with train."
            raise SpecError(f"{again}{alone}: leave one of the two out")
        if world is None and isinstance(workers, int) and not self.rdzv and self.min_workers > workers:
            raise SpecError(
                f"--min-workers {self.min_workers} is more than --workers {workers}: it would never start"
            )
        if world is None and workers in (None, 1) and not self.rdzv and self.min_workers > 1:
            raise SpecError(f"--min-workers {self.min_workers} needs --workers: give both")
        if self.min_workers > most:
            raise SpecError(f"--min-workers {self.min_workers} is more than {what}")
        self._check_mpi()
