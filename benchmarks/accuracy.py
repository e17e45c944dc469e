"""Test accuracy of a recipe over several seeds, as a record.

python benchmarks/accuracy.py fashion --seeds 3 --at-least 91 -o data.dir=DIR

Each seed is trained in a process of its own. Ctrl-C or SIGTERM ends all of them at once.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from measure import RESULTS, make_parser, make_record

import lockstep
from lockstep.cli.train import resolve
from lockstep.spec.record import write_records


def main() -> None:
    parser = make_parser(__doc__, None)
    parser.add_argument("recipe")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--at-least", type=float, default=0.0, help="percent; fails below it")
    parser.add_argument(
        "--jobs", type=int, default=1, help="seeds trained side by side; above 1 no img/s is recorded"
    )
    parser.add_argument("-o", "--override", action="append", default=[])
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)  # train this one, here
    options = parser.parse_args()
    if options.seed is not None:
        train(options)
        return
    summaries = Seeds(options).train_all()
    percents = [100 * summary["accuracy"] for summary in summaries]
    speed = {"img_s": [round(summary["img_s"]) for summary in summaries]} if options.jobs == 1 else {}
    record = make_record(
        f"{options.recipe}: test accuracy after {summaries[0]['epochs']} epochs",
        percents,
        "%",
        each=percents,
        **speed,
        weights_sha256=[summary["weights_sha256"] for summary in summaries],
    )
    write_records(options.output or RESULTS / f"accuracy-{options.recipe}.json", [record])
    low, high = record.spread
    print(f"{record.name}: {record.value:.2f} % (n = {record.n}, {low:.2f} to {high:.2f})")
    sys.exit(0 if low >= options.at_least else 1)


class Seeds:
    """One process a seed, so many at a time. A signal, or a seed that fails, ends all of them.

    They are killed: a run that is asked to stop finishes its step and saves, and nobody wants what it saves.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options, self._ended = options, threading.Event()
        self._running: list[subprocess.Popen[bytes]] = []

    def train_all(self) -> list[dict[str, Any]]:
        """The summaries, in order of the seeds."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, frame: sys.exit(128 + number))
        with ThreadPoolExecutor(self._options.jobs) as pool:
            try:
                futures = [pool.submit(self._train_apart, seed) for seed in range(self._options.seeds)]
                return [future.result() for future in futures]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                self._ended.set()
                for process in self._running:
                    kill(process)
                raise

    def _train_apart(self, seed: int) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            output, options = Path(folder) / "summary.json", self._options
            command = [sys.executable, __file__, options.recipe, "--seed", str(seed), "--output", str(output)]
            command += [word for override in options.override for word in ("-o", override)]
            process = subprocess.Popen(command, start_new_session=True)
            self._running.append(process)
            if self._ended.is_set():  # while it was started
                kill(process)
            if process.wait():
                raise RuntimeError(f"seed {seed} ended with code {process.returncode}")
            summary: dict[str, Any] = json.loads(output.read_text())
            return summary


def kill(process: subprocess.Popen[bytes]) -> None:
    """With the processes it has started, such as compilers."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def train(options: argparse.Namespace) -> None:
    """One seed, in the folder that its summary goes to."""
    launch = lockstep.Launch(name=f"{options.recipe}-seed{options.seed}", runs_dir=options.output.parent)
    overrides = [*options.override, f"seed={options.seed}"]
    run, _ = resolve(argparse.Namespace(recipe=options.recipe, config=None, override=overrides), launch)
    options.output.write_text(json.dumps(lockstep.train(run, launch=launch).summary))


if __name__ == "__main__":
    main()
