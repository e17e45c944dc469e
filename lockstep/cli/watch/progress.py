"""Prints the progress of a run: a bar on a terminal, plain lines elsewhere, or only warnings."""

from __future__ import annotations

import os
import sys
import time
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

from lockstep.cli.watch.best_line import describe_best, describe_kept
from lockstep.cli.watch.layer_line import describe_layers
from lockstep.cli.watch.tried import describe_try
from lockstep.runs.event import (
    CheckpointSaved,
    EpochDone,
    Event,
    Finished,
    Notice,
    Regrouped,
    Started,
    StepDone,
    Tried,
)

_LINE_EVERY_S = 10.0
_SOME, _MUCH, _TOO_MUCH = 0.05, 0.1, 0.2  # waiting for data is told in a step's line, an epoch's, at the end

_HELP = (
    "`lockstep data pack`, a higher --decode-threads or a --pixel-cache help with image files, "
    "Launch(data_processes=N) with a data set in Python; `lockstep bench io` measures the disk"
)


class _Console(Console):
    """A console that stops printing when its pipe is closed, so that training goes on."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


class Progress:
    """An event listener that prints progress; a context manager, which restores the terminal at its end."""

    def __init__(self, stream: TextIO, plain: bool = False) -> None:
        """`plain`: print lines even if the stream looks like a terminal."""
        self._console = _Console(file=stream, highlight=False, force_terminal=False if plain else None)
        self._started: Started | None = None
        self._img_s, self._wait_share = 0.0, 0.0
        self._last_line = time.monotonic()
        self._bar = Bar(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(bar_width=None),
            TextColumn("step {task.completed:.0f}/{task.total:.0f} {task.description}"),
            console=self._console,
            transient=True,
        )
        self._task = self._bar.add_task("", total=1, visible=False, epoch="")

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop_bar()

    def __call__(self, event: Event) -> None:
        match event:
            case Started():
                self._start(event)
            case StepDone():
                self._step(event)
            case EpochDone():
                self._epoch(event)
            case Notice():
                style = "bold yellow" if event.warning else "dim"
                prefix = "warning: " if event.warning else ""
                self._print(f"{prefix}{event.text}", style)
            case Regrouped():
                self._print(describe(event), "bold yellow")
            case CheckpointSaved():
                pass  # a line for each checkpoint would hide the rest
            case Tried():
                for line in describe_try(event):
                    self._print(line)
            case Finished():
                self._finish(event)

    def _start(self, event: Started) -> None:
        self._started = event
        self._last_line = time.monotonic()
        if not event.takes_over:
            self._introduce(event)
        if self._console.is_terminal:
            self._bar.update(self._task, total=_count_steps(event), visible=True)
            self._bar.start()

    def _introduce(self, event: Started) -> None:
        run, counts = event.run, (event.num_train, event.num_val, event.num_test)
        self._print(
            f"{event.model} ({event.num_params:,} parameters) on {event.data} "
            f"({' + '.join(f'{count:,}' for count in counts if count)} images), {event.device}"
        )
        word, steps = ("and", _count_steps(event)) if run.train.growth else ("of", event.steps_per_epoch)
        self._print(
            f"batch {run.train.batches} in {run.train.lanes} lanes, {_count(run.train.epochs, 'epoch')} "
            f"{word} {_count(steps, 'step')}, {run.train.precision}, "
            f"{event.kernels} kernels, {_count(event.num_workers, 'worker')}; identity {event.identity[:12]}"
        )
        cores = len(os.sched_getaffinity(0))
        if event.device == "cpu" and event.num_workers * run.train.threads == 1 < min(cores, run.train.lanes):
            self._print(f"1 of {cores} cores is used: --workers auto uses more, with the same bits", "dim")
        where = f", from step {event.resumed_step}" if event.resumed_step else ""
        self._print(f"run {event.directory}{where}", "dim")

    def _step(self, event: StepDone) -> None:
        assert self._started
        self._img_s = 0.9 * self._img_s + 0.1 * event.img_s if self._img_s else event.img_s
        images = self._started.run.train.batch_of(event.epoch) * event.steps
        share = min(event.data_wait_s * event.img_s / images, 1.0)
        self._wait_share = 0.9 * self._wait_share + 0.1 * share
        data = f"data {100 * self._wait_share:.0f} %  " if self._wait_share > _SOME else ""
        text = (
            f"loss {event.loss:.4f}  {_percent(event.accuracy, '5.1')}{self._img_s:,.0f} img/s  {data}"
            f"{self._time_left(event)} left"
        )
        if self._console.is_terminal:
            epoch = f"{event.epoch + 1}/{self._started.run.train.epochs}"
            self._bar.update(self._task, completed=event.step, description=text, epoch=epoch)
        elif time.monotonic() - self._last_line > _LINE_EVERY_S:
            self._last_line = time.monotonic()
            self._print(f"  step {event.step}  {text}")

    def _epoch(self, event: EpochDone) -> None:
        assert self._started
        self._last_line = time.monotonic()
        width = len(str(self._started.run.train.epochs))
        share = event.wait_share
        waiting = f", {100 * share:.0f} % waiting for data" if share > _MUCH else ""
        self._print(
            f"epoch {event.epoch + 1:{width}}/{self._started.run.train.epochs}  "
            f"train loss {event.train_loss:.4f} {_percent(event.train_accuracy)}"
            f"{event.split} loss {event.eval_loss:.4f} {_percent(event.eval_accuracy)}{_list(event.metrics)}"
            f"{event.img_s:,.0f} img/s{waiting}{'  best' if event.best else ''}"
        )

    def _finish(self, event: Finished) -> None:
        self._stop_bar()
        summary = event.summary
        counted = tested = ""
        if "accuracy" in summary:
            best = describe_best(summary)
            counted = f"accuracy {100 * summary['accuracy']:.2f} %, {best}"
            tested = f"accuracy {100 * summary.get('test_accuracy', 0):.2f} %, "
        self._print(
            f"done: {summary.get('split', 'test')} {counted}loss {summary['loss']:.4f}, "
            f"{_list(summary.get('metrics', {}), ', ')}{summary['img_s']:,.0f} img/s"
        )
        if kept := describe_kept(summary):
            self._print(kept)
        if "test_loss" in summary:
            own = _list(summary.get("test_metrics", {}), ", ")
            self._print(
                f"test {tested}{own}loss {summary['test_loss']:.4f}: "
                "of the last weights, on images that were used for no choice"
            )
        self._print(f"weights_sha256 {summary['weights_sha256']}")
        if (share := summary.get("data_wait_share", 0.0)) > _TOO_MUCH:
            self._print(f"{100 * share:.0f} % of the time was spent waiting for data: {_HELP}", "bold yellow")
        for worker, stage in enumerate(summary.get("stages", ())):
            self._print(
                f"worker {worker}, stage {stage['stage']}: busy {stage['busy_s']:.3f} s and waiting "
                f"{stage['waited_s']:.3f} s a step ({stage['bubble']:.0%}), sent {stage['sent_mb']:.2f} MB a "
                f"step to its neighbours, at most "
                f"{_count(stage['lanes_in_flight'], 'lane')} at once, {stage['peak_mb']:,.0f} MB at its peak"
            )
        if "layers" in summary:
            self._print(describe_layers(summary["layers"]))
        for layer in summary.get("by_channel", ()):
            self._print(
                f"{layer['layer']} by channel: a worker sent at most {max(layer['sent_mb']):.2f} MB a step "
                f"in {max(layer['exchange_s']):.3f} s, waiting included; by data it would be "
                f"{layer['by_data_mb']:.2f} MB"
            )
        names = "summary.json", "curves.png", "pipeline.png", "layers.png", "metrics.jsonl", "checkpoints/"
        there = [name for name in names if (event.directory / name).exists()]
        self._print(f"in {event.directory}: {', '.join(there)}", "dim")

    def _stop_bar(self) -> None:
        if self._bar.live.is_started:
            self._bar.stop()

    def _time_left(self, event: StepDone) -> str:
        assert self._started
        train, images = self._started.run.train, self._started.num_train
        rest = range(event.epoch, train.epochs)
        left = sum(stage.steps(images, rest) * stage.batch for stage in train.stages)
        seconds = round((left - event.step_in_epoch * train.batch_of(event.epoch)) / self._img_s)
        hours, left = divmod(seconds, 3600)
        return f"{hours}:{left // 60:02}:{left % 60:02}" if hours else f"{left // 60}:{left % 60:02}"

    def _print(self, text: str, style: str | None = None) -> None:
        """Print a line, above the bar if there is one; it is never wrapped or parsed as markup."""
        self._console.print(text, style=style, markup=False, soft_wrap=True)


def tell_warnings(event: Event) -> None:
    """An event listener that prints only warnings and changes of workers."""
    if isinstance(event, Notice) and event.warning:
        print(f"lockstep: warning: {event.text}", file=sys.stderr, flush=True)
    elif isinstance(event, Regrouped):
        print(f"lockstep: warning: {describe(event)}", file=sys.stderr, flush=True)


def describe(event: Regrouped) -> str:
    """One line for a change of workers: who, on which host, from which step on, and how long it took."""
    again = f", {_count(event.undone, 'step')} to do again" * bool(event.undone)
    again += f", {event.spares} spare" * bool(event.spares)
    went_on = f"{_count(event.workers, 'worker')} went on from step {event.step} after {event.seconds:.2f} s"
    return f"{'; '.join(event.changes)}: {went_on}{again}"


def _percent(accuracy: float | None, width: str = "6.2") -> str:
    """An accuracy; a space if there is none."""
    return " " if accuracy is None else f"acc {100 * accuracy:{width}f} %  "


def _list(metrics: dict[str, float], end: str = "  ") -> str:
    return "".join(f"{name} {value:.4g}{end}" for name, value in metrics.items())


def _count_steps(event: Started) -> int:
    """The steps of the whole run."""
    train = event.run.train
    return sum(stage.steps(event.num_train, range(train.epochs)) for stage in train.stages)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number > 1 else ''}"
