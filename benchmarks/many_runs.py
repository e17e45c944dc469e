"""Many runs on one machine, several at once in processes that stay, each result kept as soon as it is there.

What is kept in a file of lines is not trained again, so a benchmark that was stopped goes on.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path
from typing import Any

Key = tuple[str, ...]  # a recipe, and what is set over it


class ManyRuns:
    """Trains runs, so many side by side, until a number of seconds is over."""

    def __init__(self, kept: Path, jobs: int, seconds: float) -> None:
        self._kept, self._end = kept, time.monotonic() + seconds
        lines = kept.read_text().splitlines() if kept.exists() else []
        self.found: dict[Key, dict[str, Any]] = {tuple(row["run"]): row for row in map(json.loads, lines)}
        self._jobs = jobs
        self._pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"))

    def __enter__(self) -> ManyRuns:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def train(self, keys: Iterable[Key]) -> None:
        """Train those that are not known yet; what is left when the time is over stays unknown."""
        waiting = [key for key in dict.fromkeys(keys) if key not in self.found]
        running: dict[Future[dict[str, Any]], Key] = {}
        while waiting or running:
            while waiting and len(running) < self._jobs and time.monotonic() < self._end:
                key = waiting.pop(0)
                running[self._pool.submit(train_one, key)] = key
            if not running:
                print(f"no time for {len(waiting)} runs", flush=True)
                return
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                self._keep(running.pop(done), done.result())

    def _keep(self, key: Key, result: dict[str, Any]) -> None:
        self.found[key] = {"run": list(key), **result}
        with self._kept.open("a") as file:
            file.write(json.dumps(self.found[key]) + "\n")
        print(
            f"{result.get('accuracy')} {result.get('test_accuracy')} {result['took_s']} s", *key, flush=True
        )

    def known(self, keys: Sequence[Key], what: str) -> list[float]:
        """One number of each run that is known; 0 of one that did not end, as its loss was not finite."""
        return [self.found[key].get(what) or 0.0 for key in keys if key in self.found]


def train_one(key: Key) -> dict[str, Any]:
    """The summary of a run, in short."""
    import gc

    import torch

    import lockstep
    from lockstep.cli.train import resolve
    from lockstep.errors import NumericsError

    recipe, *overrides = key
    start = time.monotonic()
    gc.collect()  # the run before this one in the same process may hold most of a GPU's memory
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    with tempfile.TemporaryDirectory() as folder:
        launch = lockstep.Launch(name="run", runs_dir=Path(folder))
        run, _ = resolve(argparse.Namespace(recipe=recipe, config=None, override=overrides), launch)
        try:
            summary = lockstep.train(run, launch=launch, on_event=lambda event: None).summary
        except NumericsError:
            return {"accuracy": None, "took_s": round(time.monotonic() - start, 1)}
    kept = ("accuracy", "test_accuracy", "loss", "img_s", "steps", "weights_sha256", "feedback_sha256")
    took = {"took_s": round(time.monotonic() - start, 1)}
    return {name: summary[name] for name in kept if name in summary} | took
