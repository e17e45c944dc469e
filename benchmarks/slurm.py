"""Jobs under a real Slurm that are warned, moved or cut off, beside the same run that nobody disturbed.

python benchmarks/slurm.py

Makes a Slurm of this machine's own (`slurm_cluster.py`), submits the batch files of `examples/slurm/`, and
compares the hashes. Every job is disturbed once, and has to come to its end by itself.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from measure import make_parser, make_record
from slurm_cluster import SlurmCluster, what_is_missing

from lockstep.spec.record import write_records

HASHES = ("weights_sha256", "optimizer_sha256", "loss", "accuracy", "steps")
KEYS = ("data.num_train=1024", "data.num_test=64", "checkpoint.every_steps=1000")
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "PREEMPTED", "NODE_FAIL"}
STEPS = 10  # before a job is disturbed
USER_SIGNAL = "SlurmctldParameters=preempt_send_user_signal"


@dataclass(frozen=True)
class Case:
    """A batch file of the examples, submitted with flags, and what happens to its job."""

    file: str
    nodes: int
    disturb: Callable[[SlurmCluster, str], None]
    flags: tuple[str, ...] = ()
    words: tuple[str, ...] = ()  # of the training
    more: str = ""  # of Slurm's configuration
    is_moved: bool = True  # whether it has to be queued again
    epochs: int = 16

    @property
    def run_words(self) -> list[str]:
        """The Run, as `lockstep train` takes it."""
        keys = (*KEYS, f"train.epochs={self.epochs}")
        return ["shapes", *(word for key in keys for word in ("-o", key))]


def main() -> None:
    options = make_parser(__doc__, "slurm-cpu.json").parse_args()
    if missing := what_is_missing():
        sys.exit(f"no Slurm can be made here: {missing}")
    found = {}
    for name, case in CASES.items():
        found[name] = run_case(case, undisturbed(tuple(case.run_words)))
        print(f"{name}: {found[name]}", flush=True)
    others = [float(not row["same_hashes"]) for row in found.values()]
    record = make_record(
        "jobs under Slurm that were disturbed and ended with other bits than the run that was not",
        [sum(others)],
        "jobs",
        num_jobs=len(found),
        jobs=found,
        slurm=subprocess.run(["slurmctld", "-V"], check=True, capture_output=True, text=True).stdout.strip(),
        weights_sha256={
            case.epochs: undisturbed(tuple(case.run_words))["weights_sha256"] for case in CASES.values()
        },
    )
    write_records(options.output, [record])
    sys.exit(1 if any(others) else 0)


@cache
def undisturbed(run_words: tuple[str, ...]) -> dict[str, object]:
    """The hashes of one worker that nobody disturbs."""
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--runs-dir", folder, "--name", "calm", "--device", "cpu"]
        words = [sys.executable, "-m", "lockstep", "train", *run_words, *flags]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
        return hashes(Path(folder, "calm"))


def hashes(run: Path) -> dict[str, object]:
    summary = json.loads((run / "summary.json").read_text())
    return {key: summary[key] for key in HASHES}


def run_case(case: Case, expected: dict[str, object]) -> dict[str, Any]:
    """Submit a job, disturb it, and wait for its own end."""
    with tempfile.TemporaryDirectory() as folder, SlurmCluster(Path(folder), more=case.more) as cluster:
        flags = [f"--nodes={case.nodes}", "--ntasks-per-node=1", "--cpus-per-task=1", *case.flags]
        job, run = cluster.train(case.file, flags, *case.run_words, *case.words)
        wait_for_steps(cluster, job, run)
        start = time.monotonic()
        case.disturb(cluster, job)
        if case.is_moved:
            cluster.wait_for(lambda: cluster.state(job) != "RUNNING", "the job to be stopped")
        stopped_s = time.monotonic() - start
        cluster.wait_for(lambda: cluster.state(job) in ENDED, f"the end of job {job}")
        facts = cluster.facts(job)
        if facts["JobState"] != "COMPLETED" or (int(facts["Restarts"]) > 0) != case.is_moved:
            raise SystemExit(f"job {job} is {facts['JobState']}:\n{cluster.log(job)}")
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        steps = [row["step"] for row in rows if row["kind"] == "step"]
        return {
            "same_hashes": hashes(run) == expected,
            "each_step_once": steps == list(range(1, len(steps) + 1)),
            "queued_again": int(facts["Restarts"]),
            **({"stopped_after_s": round(stopped_s, 1)} if case.is_moved else {}),
        }


def wait_for_steps(cluster: SlurmCluster, job: str, run: Path) -> None:
    """Wait until a job has trained for some steps."""

    def num_steps() -> int:
        if cluster.state(job) in ENDED:
            raise SystemExit(f"job {job} ended before it was disturbed:\n{cluster.log(job)}")
        rows = run / "metrics.jsonl"
        return rows.read_text().count('"kind": "step"') if rows.is_file() else 0

    cluster.wait_for(lambda: num_steps() >= STEPS, f"{STEPS} steps")


def want_nodes(cluster: SlurmCluster, job: str) -> None:
    """A job of a higher partition wants all nodes."""
    cluster.submit("--partition=high", "--nodes=3", "--wrap", "sleep 1")


def queue_by_hand(cluster: SlurmCluster, job: str) -> None:
    cluster.call("scontrol", "requeue", job)


def cut_off(host: str) -> Callable[[SlurmCluster, str], None]:
    """A node loses the network; Slurm gives it up after half a minute."""
    return lambda cluster, job: cluster.cut(host)


def do_nothing(cluster: SlurmCluster, job: str) -> None:
    """Its time will run out: Slurm looks every half a minute, and warns as early as it has to."""


CASES = {
    "warned by SIGUSR1 before its time is over": Case(
        "train.sbatch", 2, do_nothing, flags=("--time=1", "--signal=USR1@10"), epochs=100
    ),
    "warned by SIGUSR1 before a higher job takes its nodes": Case(
        "train.sbatch", 3, want_nodes, more=USER_SIGNAL
    ),
    "told by SIGTERM that a higher job takes its nodes": Case("train.sbatch", 3, want_nodes),
    "queued again by hand": Case("train.sbatch", 3, queue_by_hand),
    "one of its two nodes cut off, another in its place": Case("train.sbatch", 2, cut_off("node2")),
    "a launcher on each of three nodes, warned by SIGUSR1": Case(
        "nodes.sbatch", 3, want_nodes, words=("--workers", "1"), more=USER_SIGNAL
    ),
    "a launcher on each of two nodes, the first without power, another in its place": Case(
        "nodes.sbatch", 2, lambda cluster, job: cluster.end("node1"), words=("--workers", "1")
    ),
    "a launcher on each of three nodes, the last cut off": Case(
        "nodes.sbatch", 3, cut_off("node3"), words=("--workers", "1"), is_moved=False
    ),
}

if __name__ == "__main__":
    main()
