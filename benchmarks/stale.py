"""Which records are older than what they speak of.

python benchmarks/stale.py

A record names the commit it was measured at, and depends on some of the files (`DEPENDS_ON`). It is stale if
one of these changed since then. Files are followed through renames; a rename alone is no change.

confirmed.toml names later commits at which something cheaper than the whole measurement gave what the record
has, and says what: a seed that was trained again to the same `weights_sha256`, a case that was timed again.
Such a record is stale if a file changed since the last of these commits.

Ends with 1 if a record is stale, or names a commit that is not in the history.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lockstep.spec.record import read_records

HERE = Path(__file__).parent
ROOT = HERE.parent
TRAINING = ["kernels", "lower", "models", "data", "recipes", "comm", "train"]
TRAINING += ["spec/rule/optimizer_rule.py", "spec/rule/learning_rate.py", "lanes/step_reduction.py"]
STEP_ON_GPU = ["kernels", "lower", "models", "train/device"]
WORKERS = ["elastic", "comm", "train/worker.py", "train/loop.py", "train/step.py", "train/handshake.py"]
WORKERS += ["lanes/step_reduction.py"]
TIMING = ["gpu_step", "case", "timing", "time_job", "peers", "own_step", "flax_peer"]
PIECES = ["conv_piece", "window", "row_buffer", "channel_segment", "pointwise"]
# records by name → the files of lockstep/ and the scripts of benchmarks/ that they depend on
DEPENDS_ON: dict[str, tuple[list[str], list[str]]] = {
    "checkpoint-cost-*": (
        ["runs/saving", "runs/checkpoint.py", "runs/state_parts.py", "train/loop.py"],
        ["checkpoint_cost"],
    ),
    "block-order-*": (["data/order.py", "spec/sample/sample_order.py"], ["block_order"]),
    "feeding-*": (
        ["data/images", "data/decoding", "data/feeding.py", "train/device/prefetch.py"],
        ["feeding"],
    ),
    "decode-*": (
        ["data/decoding/decode.py", "data/images/random_box.py", "data/pack/raw_split.py"],
        ["decode"],
    ),
    "folder-open-*": (
        [f"data/images/{name}.py" for name in ("folder", "folder_listing", "size_cache", "image_file")],
        ["folder_open"],
    ),
    "pack-open-*": (["data/pack/pack_facts.py", "data/pack/pack_set.py"], ["pack_open"]),
    "pack-kills-*": (["data/pack"], ["pack_kills"]),
    "pipeline-timm.json": (["parallel"], ["pipeline_timm"]),
    "pipeline-cpu.json": (["parallel", "comm", "train"], ["pipeline"]),
    "plans-gpu.json": ([*TRAINING, "parallel"], ["gpu_plans"]),
    "compiled-blocks-gpu.json": (["lower/compiled"], ["gpu_plans"]),
    "plans-cpu.json": ([*TRAINING, "parallel", "runs"], ["plan_matrix", "plan_model"]),
    "plan-kills-*": ([*TRAINING, *WORKERS, "parallel", "runs"], ["plan_kills"]),
    "shard-memory-*": (["comm", "parallel", "runs", "train"], ["shard_memory"]),
    "accuracy-compression-*": ([*TRAINING, "comm/compress"], ["accuracy_sets", "many_runs"]),
    "accuracy-fp16-*": (TRAINING, ["accuracy_sets", "many_runs"]),
    "accuracy-*": (TRAINING, ["accuracy"]),
    "matrix-compress-*": ([*TRAINING, *WORKERS, "runs"], ["compress_matrix"]),
    "recompute-*": (["lower", "kernels", "models", "train/device"], ["recompute"]),
    "matrix-*": ([*TRAINING, "elastic"], ["matrix"]),
    "kills-*": ([*TRAINING, "runs"], ["kills"]),
    "recovery-*": (WORKERS, ["faults"]),
    "soak-*": ([*WORKERS, *TRAINING, "runs"], ["faults"]),
    "cost-*": (WORKERS, ["faults"]),
    "slurm-*": (
        [
            "cli/batch",
            "cli/launch.py",
            "spec/world.py",
            "spec/start",
            "elastic",
            "train/interrupt.py",
            "train/loop.py",
            "runs/resume.py",
        ],
        ["slurm", "slurm_cluster"],
    ),
    "start-*": ([*WORKERS, "train/setup.py", "cli"], ["workers"]),
    "workers-*": ([*WORKERS, "lower", "kernels/stock"], ["workers"]),
    "channel-bytes-*": (["comm", "parallel/mix"], ["channel_bytes", "channel_exchange", "shaped_link"]),
    "channel-bits-*": ([*TRAINING, "parallel/mix", "parallel/split", "runs"], ["channel_bits"]),
    "halo-conv-*": ([f"parallel/split/layers/{name}.py" for name in PIECES], ["halo_conv"]),
    "layer-plans-*": ([*TRAINING, "parallel", "runs"], ["layer_plans"]),
    "layer-*": ([*TRAINING, "parallel/split"], ["layer_cost", "layer_share", "watched_train"]),
    "cut-*": ([*TRAINING, "parallel/split"], ["cut_accuracy"]),
    "foresight-*": (["planner", "measure", "train/foresight"], ["foresight"]),
    "simulated-*": (["planner/simulation", "planner/exchange_time.py"], ["goodput"]),
    "reduction-*": (["comm"], ["reduction"]),
    "tree-reduce-*": (["comm"], ["tree_reduce", "reduction"]),
    "lightning-*": (["lightning", "lanes", "comm"], ["lightning_overhead"]),
    "slow-links-*": (
        ["comm", "train/step.py", "lanes/step_reduction.py", "lower/lane_by_lane.py"],
        ["slow_links", "slow_worker", "shaped_link", "ddp_peer"],
    ),
    "hook-accuracy*": (
        [*TRAINING, "planner/compress/parcel.py"],
        ["hook_accuracy", "ddp_peer", "many_runs"],
    ),
    "large-batch-*": (TRAINING, ["large_batch", "many_runs"]),
    "muon-epochs-*": (TRAINING, ["muon_epochs", "many_runs"]),
    "before-after-*": (["comm", "train", "lower"], ["before_after"]),
    "lanes-*": (["lower", "kernels/stock", "comm/tree.py", "train/step.py"], ["lanes"]),
    "gpu-inference-*": (["kernels", "lower", "models", "runs/predictor.py"], ["gpu_inference"]),
    "roofline-*": (["kernels/triton", "lower/fused", "lower/flat_table.py"], ["roofline"]),
    "lab-gemm-*": (["lab/gemm", "lab/timing.py"], ["lab"]),
    "lab-conv-*": (["lab/conv", "lab/timing.py"], ["lab"]),
    "lab-threads-*": (["lab/threads", "cli/lab/worker_runs.py"], ["lab"]),
    "lab-baselines-*": (["lab/baselines", "lab/threads", "cli/lab/baselines.py"], ["lab"]),
    "step-kernels-*": (STEP_ON_GPU, ["step_kernels", "gpu_step", "case", "peers", "own_step"]),
    "update-cpu*": (["kernels/one_pass_update.py", "train/optimizer.py"], ["update_time"]),
    "gpu-*": (STEP_ON_GPU, TIMING),
}


@dataclass(frozen=True)
class Confirmed:
    """A commit at which some records still held, and how that is known."""

    commit: str
    records: tuple[str, ...]  # patterns of their names
    how: str


def main() -> None:
    columns = "record", "measured at", "confirmed at", "changed since"
    table = Table(*columns, title="records and what they depend on")
    confirmed = read_confirmed()
    num_stale = 0
    for path in sorted((HERE / "results").glob("*.json")):
        for commit in sorted({record.commit for record in read_records(path)}):
            held = [row.commit for row in confirmed if any(fnmatch(path.stem, glob) for glob in row.records)]
            since = [found for found in map(commits_since, [commit, *held]) if found is not None]
            changed = changed_files(path.name, min(since, key=len)) if since else ["no such commit"]
            num_stale += bool(changed)
            table.add_row(path.stem, commit, ", ".join(held), summarize(changed))
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    print(f"{num_stale} stale" if num_stale else "none is stale")
    sys.exit(1 if num_stale else 0)


def dependencies(name: str) -> list[str]:
    """The paths that a record depends on; the first pattern that fits its name counts."""
    rooms, scripts = next(value for pattern, value in DEPENDS_ON.items() if fnmatch(name, pattern))
    return [*(f"lockstep/{room}" for room in rooms), *(f"benchmarks/{script}.py" for script in scripts)]


def read_confirmed() -> list[Confirmed]:
    """The rows of confirmed.toml."""
    rows = tomllib.loads((HERE / "confirmed.toml").read_text(encoding="utf-8"))["confirmed"]
    return [Confirmed(row["commit"], tuple(row["records"]), row["how"]) for row in rows]


def commits_since(commit: str) -> set[str] | None:
    """The commits after one; None if it is not in the history of what is checked out."""
    found = git("merge-base", "--is-ancestor", commit, "HEAD")
    return None if found.returncode else set(git("rev-list", f"{commit}..HEAD").stdout.split())


def changed_files(name: str, since: set[str]) -> list[str]:
    """The files a record depends on that changed in one of these commits."""
    files = git("ls-files", "--", *dependencies(name)).stdout.splitlines()
    return [file for file in files if file.endswith((".py", ".toml")) and since & changes(file)]


@cache
def changes(file: str) -> frozenset[str]:
    """The commits that changed what a file holds, through its renames."""
    log = git("log", "--follow", "-M", "--format=commit %H", "--name-status", "--", file).stdout
    found, commit = set(), ""
    for line in log.splitlines():
        if line.startswith("commit "):
            commit = line.removeprefix("commit ")
        elif line and not line.startswith("R100"):
            found.add(commit)
    return frozenset(found)


def summarize(changed: list[str]) -> str:
    """The changed files in a line."""
    first = ", ".join(file.removeprefix("lockstep/") for file in changed[:3])
    more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
    return f"{first}{more}" or "nothing"


def git(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)


if __name__ == "__main__":
    main()
