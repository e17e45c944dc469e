"""Trains runs in processes of their own, several at once; a signal reaches all of them."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO

from lockstep.cli.search.pool_view import PoolView
from lockstep.cli.search.swept_run import SweptRun
from lockstep.elastic.process_control import fate
from lockstep.train.interrupt import Interrupt

_LOOK_S = 0.05
_STOPPED = (130, 143, -signal.SIGINT, -signal.SIGTERM)  # after saving, or before there was anything to save


@dataclass
class _Training:
    """A process that trains a run, and what it says."""

    swept: SweptRun
    process: subprocess.Popen[bytes]
    said: IO[bytes]
    slot: int
    began: float

    def last_words(self) -> str:
        """The last line that it said, else how it ended."""
        self.said.seek(0)
        lines = [line for line in self.said.read().decode(errors="replace").splitlines() if line.strip()]
        text = lines[-1].strip().removeprefix("lockstep: ") if lines else ""
        return fate(self.process.returncode, text)


class RunPool:
    """Starts at most `jobs` trainings at once, and waits for them."""

    def __init__(self, jobs: int, options: argparse.Namespace, view: PoolView, interrupt: Interrupt) -> None:
        self._jobs, self._options, self._view, self._interrupt = jobs, options, view, interrupt
        self._training: list[_Training] = []
        self._is_told = False  # whether the trainings have the signal
        self.failed: dict[str, str] = {}  # last words, by the run's name

    def train(self, runs: Sequence[SweptRun], rung: int) -> None:
        """Train runs to the end of a rung; returns when all have ended, or are saved after a signal."""
        waiting = deque(runs)
        try:
            while self._training or (waiting and not self._interrupt.signal):
                while waiting and len(self._training) < self._jobs and not self._interrupt.signal:
                    self._start(waiting.popleft(), rung)
                self._forward()
                self._view.look(len(waiting))
                time.sleep(_LOOK_S)
                for each in [each for each in self._training if each.process.poll() is not None]:
                    self._end(each)
        finally:
            self._abandon()

    @property
    def is_stopped(self) -> bool:
        """Whether a signal asked to stop."""
        return self._interrupt.signal is not None

    def _start(self, swept: SweptRun, rung: int) -> None:
        slot = min(set(range(self._jobs)) - {each.slot for each in self._training})
        said = tempfile.TemporaryFile()  # noqa: SIM115  (closed when the training has ended)
        process = start_training(
            train_words(swept, rung, self._options), said, find_devices(slot, self._options)
        )
        self._training.append(_Training(swept, process, said, slot, time.monotonic()))
        self._view.started(swept, swept.rungs[rung])

    def _end(self, each: _Training) -> None:
        self._training.remove(each)
        code = each.process.returncode
        words = each.last_words() if code else ""
        stopped = self._interrupt.signal and code in _STOPPED
        if words and not stopped:
            self.failed[each.swept.name] = words
        each.said.close()
        self._view.ended(each.swept, time.monotonic() - each.began, "" if stopped else words, bool(stopped))

    def _forward(self) -> None:
        """Hand the signal on, once; a second one ends this process, and so the trainings: `_abandon`."""
        number = self._interrupt.signal
        if number and not self._is_told:
            self._is_told = True
            self._view.stopping(number.name, len(self._training))
            for each in self._training:
                each.process.send_signal(number)

    def _abandon(self) -> None:
        """Leave no training behind, whatever ended this one."""
        for each in self._training:
            each.process.send_signal(signal.SIGTERM)
        for each in self._training:
            each.process.wait()
            each.said.close()
        self._training = []


def train_words(swept: SweptRun, rung: int, options: argparse.Namespace) -> list[str]:
    """The arguments of `lockstep` that begin a run or go on with it, up to the end of a rung."""
    words = ["train", *([options.recipe] if options.recipe else [])]
    words += ["-c", str(options.config)] if options.config else []
    words += [word for item in swept.words for word in ("-o", item)]
    words += ["--device", options.device, "--quiet"]
    words += ["--workers", str(options.workers)] if options.workers else []
    if swept.path.exists():
        words += ["--resume", str(swept.path)]
    else:
        words += ["--runs-dir", str(swept.path.parent), "--name", swept.name]
    last = rung == len(swept.rungs) - 1
    return words if last else [*words, "--stop-after-epochs", str(swept.rungs[rung])]


def start_training(words: list[str], said: IO[bytes], env: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start `lockstep` in a process group of its own, so that only this process hands it a signal."""
    command = [sys.executable, "-m", "lockstep", *words]
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, env=env, process_group=0
    )


def count_jobs(options: argparse.Namespace, runs: Sequence[SweptRun]) -> int:
    """How many runs at once: as asked, else as many as have GPUs of their own, else cores."""
    if options.jobs != "auto":
        return int(options.jobs)
    if options.workers == "auto":
        return 1  # each takes the whole machine
    each = int(options.workers or 1)
    if gpus := _count_gpus(options):
        return max(gpus // each, 1)
    cores = len(os.sched_getaffinity(0))
    return max(cores // (each * max(swept.run.train.threads for swept in runs)), 1)


def find_devices(slot: int, options: argparse.Namespace) -> dict[str, str]:
    """The environment of the training in a slot, which has GPUs of its own if there are several."""
    gpus, each = _count_gpus(options), options.workers or 1
    if gpus < 2 or each == "auto" or each >= gpus:
        return dict(os.environ)
    known = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    names = known if len(known) == gpus else [str(number) for number in range(gpus)]
    first = slot % (gpus // each) * each
    return {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(names[first : first + each])}


def _count_gpus(options: argparse.Namespace) -> int:
    if options.device == "cpu":
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
