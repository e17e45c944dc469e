"""What a worker keeps between steps under each kind of shard, beside one worker; and the most that it had.

python benchmarks/shard_memory.py

AlexNet with Adam on a CPU. At rest: the bytes of parameters, gradients and optimizer state that the worker
has, counted tensor by tensor after a step. The peak is that of the process over what it had before the
first step, so without the share itself.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from itertools import chain
from pathlib import Path

from measure import make_parser, make_record

from lockstep.spec.record import write_records

LIMIT, WORKERS = 0.26, 4
KEYS = ["model.name=alexnet", "data.size=64", "optimizer.name=adam", "optimizer.lr=0.0001", "train.batch=16"]
KEYS += [
    "train.lanes=4",
    "train.epochs=1",
    "data.num_train=64",
    "data.num_test=16",
    "schedule.warmup_epochs=0",
]
KINDS = ("none", "optimizer", "gradients", "parameters")
VARIABLE = "LOCKSTEP_MEMORY"  # the folder where each worker writes what it has


def main() -> None:
    parser = make_parser(__doc__, "shard-memory-cpu.json")
    options = parser.parse_args()
    one = max(train([]), key=lambda row: row["rest_mb"])
    records = []
    for kind in KINDS:
        plan = f"data={WORKERS}" + (f",shard={kind}" if kind != "none" else "")
        rows = train(["--plan", plan])
        rest = [row["rest_mb"] / one["rest_mb"] for row in rows]
        records.append(
            make_record(
                f"AlexNet, Adam, {plan}: bytes of a worker at rest over one worker's",
                [max(rest)],
                "x",
                limit=LIMIT if kind == "parameters" else None,
                workers=[round(share, 4) for share in rest],
                rest_mb=[row["rest_mb"] for row in rows],
                peak_mb=[row["peak_mb"] for row in rows],
                one_worker={key: one[key] for key in ("rest_mb", "peak_mb")},
            )
        )
        print(f"{records[-1].name}: {records[-1].value:.4f} {json.dumps(records[-1].details)}", flush=True)
    write_records(options.output, records)


def train(flags: list[str]) -> list[dict[str, float]]:
    """What each worker of a run wrote, by rank."""
    keys = [word for key in KEYS for word in ("-o", key)]
    with tempfile.TemporaryDirectory() as folder:
        words = ["--runs-dir", folder, "--name", "run", "--device", "cpu", "--quiet", *flags]
        command = [sys.executable, __file__, "train", "shapes", *keys, *words]
        subprocess.run(command, check=True, env={**os.environ, VARIABLE: folder})
        return [json.loads(path.read_text()) for path in sorted(Path(folder).glob("worker-*"))]


def watch() -> None:
    """In a worker: note after each step what it has, and the most that it had since the first one."""
    import importlib

    step = importlib.import_module("lockstep.train.step").Step
    call = step.__call__

    def call_and_note(self, lanes, *requests):
        if self._state.step == 0:
            Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
            self.before_mb = resident("VmRSS")
        result = call(self, lanes, *requests)
        state = self._state
        whole = [p for p in state.model.parameters() if p.numel() < 2 or any(p.stride())]
        memory = chain(*(tensors.values() for tensors in state.memory.values()))
        kept = {t.data_ptr(): t for t in [*whole, *state.trained().values(), *memory]}
        means = sum(t.numel() * 4 for t in self._lowered.params.values())  # a mean of every gradient
        share = sum(t.numel() * 4 for t in state.trained().values())
        rest = sum(t.numel() * t.element_size() for t in kept.values()) + (share if state.share else means)
        row = {"rest_mb": rest / 1e6, "peak_mb": resident("VmHWM") - self.before_mb}
        Path(os.environ[VARIABLE], f"worker-{self._mesh.world.rank}").write_text(json.dumps(row))
        return result

    step.__call__ = call_and_note


def resident(key: str) -> float:
    """Megabytes of this process, now or at most."""
    found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024 / 1e6


if __name__ == "__main__":
    if VARIABLE in os.environ:
        from lockstep.cli.main import main as train_command

        watch()
        raise SystemExit(train_command())
    main()
