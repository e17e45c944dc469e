"""Which records are older than what they speak of.

python benchmarks/stale.py

A record names the commit it was measured at, and depends on some of the files (`DEPENDS_ON`). It is stale if
one of these changed since, in another commit than those of unchanged.toml, which are known not to change what
was measured. Files are followed through renames; a rename alone is no change. Ends with 1 if a record is
stale, or names a commit that is not in the history.

For the accuracy of a recipe there is a sharper test than the age: train one of its seeds again. The same
`weights_sha256` in the record's details means that nothing it depends on has changed a bit.
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
TRAINING = ["kernels", "lower", "models", "data", "recipes", "comm", "train", "spec/optimizer_rule.py"]
STEP_ON_GPU = ["kernels", "lower", "models", "train/device"]
WORKERS = ["elastic", "comm", "train/worker.py", "train/loop.py", "train/step.py", "train/handshake.py"]
TIMING = ["gpu_step", "case", "timing", "time_job", "peers", "own_step", "flax_peer"]
# records by name → the files of lockstep/ and the scripts of benchmarks/ that they depend on
DEPENDS_ON: dict[str, tuple[list[str], list[str]]] = {
    "accuracy-*": (TRAINING, ["accuracy"]),
    "matrix-*": ([*TRAINING, "elastic"], ["matrix"]),
    "kills-*": ([*TRAINING, "runs"], ["kills"]),
    "recovery-*": (WORKERS, ["faults"]),
    "soak-*": ([*WORKERS, *TRAINING, "runs"], ["faults"]),
    "cost-*": (WORKERS, ["faults"]),
    "start-*": ([*WORKERS, "train/setup.py", "cli"], ["workers"]),
    "workers-*": ([*WORKERS, "lower", "kernels/stock"], ["workers"]),
    "reduction-*": (["comm"], ["reduction"]),
    "lanes-*": (["lower", "kernels/stock", "comm/tree.py", "train/step.py"], ["lanes"]),
    "gpu-inference-*": (["kernels", "lower", "models", "runs/predictor.py"], ["gpu_inference"]),
    "roofline-*": (["kernels/triton", "lower/fused", "lower/flat_table.py"], ["roofline"]),
    "gpu-*": (STEP_ON_GPU, TIMING),
}


@dataclass(frozen=True)
class Unchanged:
    """A commit that does not change what some records measured, and why that is known."""

    commit: str
    reason: str
    records: tuple[str, ...] = ("*",)


def main() -> None:
    table = Table(
        "record", "commit", "commits since", "changed since", title="records and what they depend on"
    )
    excused = read_unchanged()
    num_stale = 0
    for path in sorted((HERE / "results").glob("*.json")):
        for commit in sorted({record.commit for record in read_records(path)}):
            since = commits_since(commit)
            if since is None:
                num_stale += 1
                table.add_row(path.stem, commit, "", "no such commit in the history")
                continue
            changed = changed_files(path.name, since, excused)
            num_stale += bool(changed)
            table.add_row(path.stem, commit, str(len(since)), summarize(path.name, changed))
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    print(f"{num_stale} stale" if num_stale else "none is stale")
    sys.exit(1 if num_stale else 0)


def dependencies(name: str) -> list[str]:
    """The paths that a record depends on; the first pattern that fits its name counts."""
    rooms, scripts = next(value for pattern, value in DEPENDS_ON.items() if fnmatch(name, pattern))
    return [*(f"lockstep/{room}" for room in rooms), *(f"benchmarks/{script}.py" for script in scripts)]


def read_unchanged() -> list[Unchanged]:
    """The commits of unchanged.toml."""
    rows = tomllib.loads((HERE / "unchanged.toml").read_text(encoding="utf-8"))["unchanged"]
    return [Unchanged(row["commit"], row["reason"], tuple(row.get("records", ["*"]))) for row in rows]


def commits_since(commit: str) -> set[str] | None:
    """The commits after one; None if it is not in the history of what is checked out."""
    found = git("merge-base", "--is-ancestor", commit, "HEAD")
    return None if found.returncode else set(git("rev-list", f"{commit}..HEAD").stdout.split())


def changed_files(name: str, since: set[str], excused: list[Unchanged]) -> list[str]:
    """The files a record depends on that changed in a commit `since` that nothing excuses for it."""
    hidden = tuple(row.commit for row in excused if any(fnmatch(name, glob) for glob in row.records))
    counted = {commit for commit in since if not commit.startswith(hidden)} if hidden else since
    files = git("ls-files", "--", *dependencies(name)).stdout.splitlines()
    return [file for file in files if file.endswith((".py", ".toml")) and counted & changes(file)]


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


def summarize(name: str, changed: list[str]) -> str:
    """The changed files in a line, and how to find out whether that matters."""
    if not changed:
        return "nothing"
    first = ", ".join(file.removeprefix("lockstep/") for file in changed[:3])
    more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
    check = ": compare weights_sha256 of one seed" if name.startswith("accuracy-") else ""
    return f"{first}{more}{check}"


def git(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)


if __name__ == "__main__":
    main()
