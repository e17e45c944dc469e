"""What a sweep found, as a table with the best run first, and as records."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

from lockstep import __version__
from lockstep.cli.search.outcome import Outcome, mean_accuracy, mean_loss
from lockstep.spec import Record
from lockstep.spec.search.sweep import Sweep, tell_value

_HASH_DIGITS = 12
_WORDS = {"val": "validation", "test": "test"}


def sort_outcomes(found: list[Outcome]) -> list[Outcome]:
    """The best first, by the mean of a combination's seeds; runs that are not finished come after."""
    groups = by_combination(found)

    def place(each: Outcome) -> tuple[float, ...]:
        group = groups[each.swept.combination]
        mean, least = mean_accuracy(group), min(one.share for one in group)
        order = list(groups).index(each.swept.combination)
        return (-least, -(mean or 0.0), mean_loss(group), order, -(each.accuracy or 0.0))

    return sorted(found, key=place)


def by_combination(found: list[Outcome]) -> dict[str, list[Outcome]]:
    """The outcomes of all seeds, by combination."""
    groups = dict[str, list[Outcome]]()
    for each in found:
        groups.setdefault(each.swept.combination, []).append(each)
    return groups


def tell_outcomes(found: list[Outcome], sweep: Sweep) -> list[str]:
    """The lines of the table, and what is to be known of it."""
    groups, has_test = by_combination(found), any(each.test_accuracy is not None for each in found)
    head = [*map(sweep.label, sweep.keys), *(["seed", "mean", "spread"] if sweep.seeds else [])]
    head += [
        "epochs",
        "accuracy",
        "best",
        *(["test"] if has_test else []),
        "loss",
        "img/s",
        "time",
        "weights",
    ]
    table = [head]
    for each in sort_outcomes(found):
        row = [tell_value(each.swept.point[key]) for key in sweep.keys]
        row += _tell_seeds(each, groups[each.swept.combination]) if sweep.seeds else []
        row += [f"{each.epochs}/{each.swept.run.train.epochs}", _percent(each.accuracy), _percent(each.best)]
        row += [_percent(each.test_accuracy)] if has_test else []
        row += [f"{each.evaluations[-1].loss:.4f}" if each.evaluations else "", f"{each.img_s:,.0f}"]
        row += [_time(each.seconds), each.weights_sha256[:_HASH_DIGITS]]
        table.append([*row, f"FAILED: {each.failure}"] if each.failure else row)
    widths = [max(len(row[place]) for row in table) for place in range(len(head))]
    lines = [
        "  ".join([*(text.rjust(width) for text, width in zip(row, widths, strict=False)), *row[len(head) :]])
        for row in table
    ]
    return [*lines, *_tell_splits(found)]


def _tell_splits(found: list[Outcome]) -> list[str]:
    splits = sorted({each.split for each in found if each.evaluations})
    names = " or ".join(_WORDS[split] for split in splits)
    lines = [f"accuracy and loss are of {names} images; time is that of all steps"] if splits else []
    if "test" in splits and len(found) > 1:
        lines.append(
            "the best of many runs by test images looks better than it is: hold some out to choose by"
        )
    return lines


def _tell_seeds(each: Outcome, group: list[Outcome]) -> list[str]:
    known = [one.accuracy for one in group if one.accuracy is not None]
    spread = f"{100 * (max(known) - min(known)):.2f}" if known else ""
    return [str(each.swept.seed), _percent(mean_accuracy(group)), spread]


def sweep_records(found: list[Outcome], sweep: Sweep, name: str) -> list[Record]:
    """A record of each combination that has finished: its accuracy, over the seeds."""
    groups = by_combination([each for each in sort_outcomes(found) if each.is_finished])
    return [_record(combination, group, sweep, name) for combination, group in groups.items()]


def _record(combination: str, group: list[Outcome], sweep: Sweep, name: str) -> Record:
    from lockstep.runs.directory import RunDirectory

    accuracies = [100 * (each.accuracy or 0.0) for each in group]
    first, told = group[0], RunDirectory(group[0].swept.path).identity()
    details: dict[str, Any] = {
        "sweep": name,
        **first.swept.point,
        "split": first.split,
        "epochs": first.epochs,
        "each": accuracies,
        "best": [100 * (each.best or 0.0) for each in group],
        "loss": [each.evaluations[-1].loss for each in group],
        "img_s": [each.img_s for each in group],
        "seconds": [each.seconds for each in group],
        "weights_sha256": [each.weights_sha256 for each in group],
        "runs": [str(each.swept.path) for each in group],
    }
    details |= {"seeds": [each.swept.seed for each in group]} if sweep.seeds else {}
    if first.test_accuracy is not None:
        details["test"] = [100 * (each.test_accuracy or 0.0) for each in group]
    return Record(
        f"{name}, {combination}: {_WORDS[first.split]} accuracy after {first.epochs} epochs",
        fmean(accuracies),
        "%",
        len(accuracies),
        (min(accuracies), max(accuracies)),
        _hardware(str(told["numerics.device"])),
        " ".join(["lockstep", *sys.argv[1:]]),
        os.environ.get("LOCKSTEP_COMMIT", "unknown"),
        {"lockstep": __version__, "python": platform.python_version(), "torch": str(told["numerics.torch"])},
        details,
    )


def draw_outcomes(path: Path, found: list[Outcome], sweep: Sweep, name: str) -> None:
    """Draw the outcomes of runs that were evaluated."""
    from lockstep.report.sweep_picture import SweptCurve, draw_sweep

    curves = [
        SweptCurve(
            combination,
            tuple(_plain(group[0].swept.point[key]) for key in sweep.keys),
            tuple(
                tuple((each.step, each.seconds, 100 * each.accuracy) for each in one.evaluations)
                for one in group
            ),
        )
        for combination, group in by_combination(sort_outcomes(found)).items()
    ]
    splits = sorted({_WORDS[each.split] for each in found})
    draw_sweep(path, name, [*map(sweep.label, sweep.keys)], " or ".join(splits), curves)


def _plain(value: Any) -> Any:
    """A number, else text."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) else tell_value(value)


def _hardware(device: str) -> str:
    """The GPU that the run's identity names, else this machine's CPU."""
    import torch

    from lockstep.measure.probe_device import name_device

    return name_device(torch.device("cpu")) if device == "cpu" else device


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.2f} %"


def _time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"
