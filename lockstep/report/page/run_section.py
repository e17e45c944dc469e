"""The runs side by side, and what differs in their configuration."""

from __future__ import annotations

import json
from collections import Counter
from html import escape
from typing import Any

from lockstep.report.page.markup import (
    Cell,
    Html,
    Section,
    html_table,
    show_number,
    show_share,
    tables_of_runs,
    write_text,
)
from lockstep.report.page.shown_run import ShownRun

_LONGEST = 60  # letters of a value
_DIGITS = 12  # of a hash
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def show_runs(runs: list[ShownRun]) -> Section | None:
    """A column a run: what it is, and what came out."""
    if not runs:
        return None
    keys: list[tuple[str, list[Cell]]] = [
        ("model", [run.setting("model.name") for run in runs]),
        ("data", [run.setting("data.name") for run in runs]),
        ("device", [run.summary.get("device") for run in runs]),
        ("workers", [run.workers for run in runs]),
        ("plan", [run.plan or None for run in runs]),
        ("kernels", [run.setting("kernels.set") for run in runs]),
        ("precision", [run.setting("train.precision") for run in runs]),
        ("batch", [run.setting("train.batch") for run in runs]),
        ("lanes", [run.setting("train.lanes") for run in runs]),
        ("epochs", [int(run.summary["epochs"]) for run in runs]),
        ("steps", [int(run.summary["steps"]) for run in runs]),
        ("evaluated on", [run.split for run in runs]),
        ("accuracy", [show_share(run.summary.get("accuracy")) for run in runs]),
        ("best accuracy", [show_share(run.summary.get("best_accuracy")) for run in runs]),
        ("best epoch by", [_judge(run.summary) for run in runs]),
        ("ended early", ["yes" if run.summary.get("stopped_early") else None for run in runs]),
        ("accuracy on test", [show_share(run.summary.get("test_accuracy")) for run in runs]),
        ("loss", [show_number(run.summary["loss"]) for run in runs]),
        ("speed", [show_number(run.summary["img_s"], unit="img/s") for run in runs]),
        ("time of all steps", [show_number(run.train_s, 3, "s") for run in runs]),
        ("waiting for data", [show_share(run.summary.get("data_wait_share")) for run in runs]),
        ("weights_sha256", _weights(runs)),
    ]
    section = Section("runs", "Runs side by side")
    section.add(tables_of_runs("Runs", "run", [run.name for run in runs], keys))
    hashes = Counter(run.summary["weights_sha256"] for run in runs)
    if max(hashes.values()) > 1:
        section.add(write_text("Runs with the same letter have the same weights, bit for bit."))
    return section


def _judge(summary: dict[str, Any]) -> str | None:
    """What chose the best epoch, and its value, where that is not the accuracy."""
    name, value = summary.get("best_by"), summary.get("best_value")
    return None if name in (None, "accuracy") or value is None else f"{name} {value:.4g}"


def show_differences(runs: list[ShownRun]) -> Section | None:
    """Keys of run.toml and of identity.json that are not the same in all runs."""
    if len(runs) < 2:
        return None
    rows = [
        *_different("workers", [run.workers for run in runs]),
        *_different("plan", [run.plan or "none" for run in runs]),
    ]
    keys = dict.fromkeys(key for run in runs for key in (*run.settings, *run.identity))
    for key in sorted(keys):
        rows += _different(key, [run.identity.get(key, run.settings.get(key)) for run in runs])
    section = Section("differences", "What differs in configuration")
    if not rows:
        section.add(write_text("Nothing: run.toml, identity.json, workers and plan are the same."))
        return section
    names = [run.name for run in runs]
    section.add(tables_of_runs("Keys of run.toml and identity.json that differ", "key", names, rows))
    if all(key in {"workers", "plan", "data.dir"} for key, _ in rows):
        section.add(write_text("None of these may change a bit: the runs have one identity."))
    return section


def show_left_out(lines: list[str]) -> Section | None:
    """What could not be shown, and why."""
    if not lines:
        return None
    rows = [line.partition(": ")[::2] for line in lines]
    section = Section("left-out", "Left out")
    section.add(html_table("Damaged or not finished", ("what", "why"), rows))
    return section


def _different(key: str, values: list[Any]) -> list[tuple[str, list[Cell]]]:
    texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
    if len(set(texts)) == 1:
        return []
    cells = ["not set" if value is None else text for value, text in zip(values, texts, strict=True)]
    return [(key, [f"{text[:_LONGEST]}…" if len(text) > _LONGEST else text for text in cells])]


def _weights(runs: list[ShownRun]) -> list[Cell]:
    """The hash of each, with a letter if another run has it too."""
    hashes = [run.summary["weights_sha256"] for run in runs]
    shared = [value for value, count in Counter(hashes).items() if count > 1]
    letters = {value: _LETTERS[place % len(_LETTERS)] for place, value in enumerate(shared)}
    return [
        Html(
            f'<code title="{escape(value, quote=True)}">{escape(value[:_DIGITS])}</code>'
            + (f' <b class="same">{letters[value]}</b>' if value in letters else "")
        )
        for value in hashes
    ]
