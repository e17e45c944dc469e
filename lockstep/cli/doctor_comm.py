"""`lockstep doctor --comm`: tries every operation between workers on every backend and device.

Each column of the table runs as its own command, `lockstep doctor --comm COLUMN`, which starts two workers
and is ended if it hangs. Each worker, whichever launcher started it, joins its group and checks it; worker 0
prints the report.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import asdict, dataclass, field
from typing import IO

from lockstep.elastic.job import Job
from lockstep.errors import LockstepError, SpecError
from lockstep.spec.system import extra_command
from lockstep.spec.world import World, read_world

COLUMNS = ("gloo-cpu", "gloo-cuda", "nccl-cuda", "mpi-cpu", "mpi-cuda")
_WORKERS = 2
_CHECK_S = 25.0  # for a worker to join its group and check it
_TELL_S = 3.0  # more for workers other than 0, so that worker 0 can still report where it hangs
_COLUMN_S = 40.0  # for a column, including the start of its workers
_END_S = 5.0  # for a column to end its workers
# Open MPI refuses root and more processes than cores; the doctor tries the network, not that rule.
_MPIRUN_ENV = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",  # Open MPI 4
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",  # Open MPI 5
}


@dataclass(frozen=True)
class Report:
    """The result of one column."""

    workers: int = 0  # 0: not tried
    operations: dict[str, str] = field(default_factory=dict)  # ok, staged, or why it failed
    reason: str = ""

    @property
    def failed(self) -> bool:
        return self.workers > 0 and self.reason != ""


def examine_comm(column: str, as_json: bool) -> int:
    """If this process is a worker, check its group; otherwise start workers for the columns."""
    world = read_world(os.environ)
    if world:
        return _work(world, column, as_json)
    if column != "all":
        return _start(column)
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell's background jobs ignore SIGINT by default
        signal.signal(number, lambda number, frame: sys.exit(128 + number))  # `_try` ends its column
    reports = {}
    for name in COLUMNS:
        missing = _find_missing(name)
        reports[name] = Report(reason=missing) if missing else _try(name)
    _show(reports, as_json)
    return int(any(report.failed for report in reports.values()))


def _find_missing(column: str) -> str:
    """What this machine lacks for a column; empty if it can be tried."""
    backend, device = column.split("-")
    if backend == "mpi" and importlib.util.find_spec("mpi4py") is None:
        return f"mpi4py is not installed: {extra_command('mpi')}"
    if backend == "mpi" and shutil.which("mpirun") is None:
        return "no mpirun on the PATH: install Open MPI or MPICH"
    if device == "cuda":
        import torch

        gpus = torch.cuda.device_count()
        if not gpus:
            return "torch sees no GPU here"
        if backend == "nccl" and not torch.distributed.is_nccl_available():
            return "this torch was built without NCCL"
        if backend == "nccl" and gpus < _WORKERS:
            return f"NCCL needs a GPU a worker; this machine has {gpus}"
    return ""


def _try(column: str) -> Report:
    """Run a column in its own process, and end it if it hangs."""
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(_command(column), stdin=subprocess.DEVNULL, stdout=output, stderr=errors)
        late = ""
        try:
            process.wait(_COLUMN_S)
        except subprocess.TimeoutExpired:
            late = f"no answer in {_COLUMN_S:.0f} s"
        finally:
            _end(process)
        report = _read_report(column, output)
        reason = late or _last_words(errors) or f"it ended with exit code {process.returncode}"
    return report or Report(_WORKERS, reason=f"{reason} (all of it: lockstep doctor --comm {column})")


def _command(column: str) -> list[str]:
    return [sys.executable, "-m", "lockstep", "doctor", "--json", "--comm", column]


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a column's launcher: it ends its workers on SIGTERM, and our own does so even if it is killed."""
    process.terminate()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _read_report(column: str, output: IO[str]) -> Report | None:
    """Find worker 0's report; a backend may have printed other lines."""
    output.seek(0)
    for line in output:
        try:
            return Report(**json.loads(line)[column])
        except (ValueError, KeyError, TypeError):
            continue
    return None


def _last_words(errors: IO[str]) -> str:
    """The line that says why a worker or its launcher failed; mpirun prints many others after it."""
    errors.seek(0)
    lines = [line.strip() for line in errors if line.strip()]
    own = [line.partition("lockstep: ")[2] for line in lines if "lockstep: " in line]
    bad = [line for line in lines if "error" in line.lower()]
    return (own or bad or lines or [""])[-1]


def _start(column: str) -> int:
    """Start the workers of one column with its backend's launcher."""
    missing = _find_missing(column)
    if missing:
        raise SpecError(f"--comm {column}: {missing}")
    if column.startswith("mpi"):
        command = ["mpirun", "-n", str(_WORKERS), sys.executable, *sys.orig_argv[1:]]
        os.execvpe(command[0], command, {**os.environ, **_MPIRUN_ENV})
    from lockstep.elastic.launcher import Launcher

    job = Job(_WORKERS, _WORKERS, preload="lockstep.elastic.worker_groups", is_elastic=False)
    return Launcher(job, _say).run()


def _say(worker: str, line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _work(world: World, column: str, as_json: bool) -> int:
    """Join the group and check it; worker 0 reports."""
    if world.size == 1:
        raise SpecError(f"{world.launcher} started 1 worker: --comm needs 2 or more")
    from lockstep.comm.self_test import OPERATIONS, check_group
    from lockstep.elastic.worker_groups import WorkerGroups
    from lockstep.kernels.numerics import prepare_device

    own = "mpi-auto" if world.launcher == "mpirun" else "auto-auto"
    backend, wanted = (own if column == "all" else column).split("-")
    device = prepare_device(wanted, threads=1, local_rank=world.local_rank)
    session = _Session(world, column, as_json)
    try:
        group = WorkerGroups(world, backend, device).next()
    except LockstepError as error:
        if world.rank == 0:
            return session.report(str(error))
        error.rank = world.rank
        raise
    session.joined(f"{group.backend}-{device.type}", group.stages(device))
    found = check_group(group, device, session.found)
    code = session.report()
    (group.close if found.keys() == OPERATIONS.keys() else group.abort)()
    session.end()
    return code


class _Session:
    """Collects a worker's results, and ends the worker if it hangs."""

    def __init__(self, world: World, column: str, as_json: bool) -> None:
        self.found: dict[str, str] = {}
        self._world, self._column, self._as_json = world, column, as_json
        self._joined = self._staged = self._told = False
        # no backend's own timeout is reliable, and a worker that is blocked in a backend handles no signals
        self._timer = threading.Timer(_CHECK_S + (_TELL_S if world.rank else 0.0), self._give_up)
        self._timer.daemon = True
        self._timer.start()

    def joined(self, column: str, staged: bool) -> None:
        """Note which group the worker has joined."""
        self._column, self._staged, self._joined = column, staged, True

    def report(self, reason: str = "") -> int:
        """As worker 0, print the results; returns the exit code."""
        self._told = True
        if self._world.rank:
            return 0  # if this worker failed, its launcher would end worker 0 before it has reported
        from lockstep.comm.self_test import OK

        failed = [f"{name}: {text}" for name, text in self.found.items() if text != OK]
        more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        reason = failed[0] + more if failed else reason
        operations = {
            name: "staged" if self._staged and text == OK and name != "barrier" else text
            for name, text in self.found.items()
        }
        _show({self._column: Report(self._world.size, operations, reason)}, self._as_json)
        return int(bool(reason))

    def end(self) -> None:
        """Stop the timer: the worker has left its group."""
        self._timer.cancel()

    def _give_up(self) -> None:
        from lockstep.comm.self_test import OPERATIONS

        doing = next((name for name in OPERATIONS if self._joined and name not in self.found), "joining")
        if not self._told:
            self.report(f"{doing} did not end in {_CHECK_S:g} s")
        os._exit(1)


def _show(reports: dict[str, Report], as_json: bool) -> None:
    """Print the table, or one line of JSON."""
    if as_json:
        print(json.dumps({name: asdict(report) for name, report in reports.items()}), flush=True)
        return
    from lockstep.comm.self_test import OPERATIONS

    rows = [["", *(name.replace("-", " ") for name in reports)]]
    for operation in OPERATIONS:
        found = [(report.operations.get(operation), report.workers) for report in reports.values()]
        cells = [cell or ("no" if workers else "–") for cell, workers in found]
        rows.append([operation, *(cell if cell in ("ok", "staged", "–") else "no" for cell in cells)])
    for first, *cells in rows:
        print(f"{first:19}" + "".join(f"{cell:11}" for cell in cells).rstrip())
    for name, report in reports.items():
        if report.reason:
            state = "" if report.workers else "not tried: "
            print(f"{name.replace('-', ' ')}: {state}{report.reason}", flush=True)
