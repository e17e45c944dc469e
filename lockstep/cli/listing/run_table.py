"""The tables of `lockstep runs`: a line for each run; a column for each run that is compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.runs.listing.listed_run import ListedRun

_HEAD = ("run", "state", "epochs", "accuracy", "best", "loss", "time", "size", "weights")
_HASH_DIGITS, _WIDEST = 12, 40
_NOTHING = "-"


def tell_runs(found: Sequence[ListedRun]) -> list[str]:
    """One line for each run, and how much all of them take."""
    rows = [
        (
            run.name,
            run.state,
            f"{run.epochs}/{run.of_epochs}",
            _percent(run.accuracy),
            _percent(run.best_accuracy),
            _number(run.loss),
            _time(run.seconds),
            _size(run.num_bytes),
            (run.weights_sha256 or _NOTHING)[:_HASH_DIGITS],
        )
        for run in found
    ]
    count = f"{len(found)} run{'s' * (len(found) != 1)}"
    return [*_align([_HEAD, *rows]), f"{count}, {_size(sum(run.num_bytes for run in found))}"]


def tell_comparison(found: Sequence[ListedRun]) -> Iterator[str]:
    """The settings that differ, what was reached, and which runs end with the same bits."""
    absent = object()
    keys = sorted({key for run in found for key in run.settings})
    differ = [
        key
        for key in keys
        if any(run.settings.get(key, absent) != found[0].settings.get(key, absent) for run in found)
    ]
    rows = [[key, *(_short(run.settings.get(key, _NOTHING)) for run in found)] for key in differ]
    reached: list[list[str]] = [
        ["state", *(run.state for run in found)],
        ["epochs", *(f"{run.epochs}/{run.of_epochs}" for run in found)],
        ["accuracy", *(_percent(run.accuracy) for run in found)],
        ["best accuracy", *(_percent(run.best_accuracy) for run in found)],
        ["loss", *(_number(run.loss) for run in found)],
        ["evaluated on", *(run.split for run in found)],
        ["time", *(_time(run.seconds) for run in found)],
        ["img/s", *(_NOTHING if run.img_s is None else f"{run.img_s:,.0f}" for run in found)],
        ["workers", *(_short(run.workers or _NOTHING) for run in found)],
        ["size", *(_size(run.num_bytes) for run in found)],
        ["weights", *((run.weights_sha256 or _NOTHING)[:_HASH_DIGITS] for run in found)],
    ]
    head = ["", *(run.name for run in found)]
    lines = _align([head, *rows, *reached])
    yield lines[0]
    yield from lines[1 : 1 + len(rows)] if rows else ["no setting differs"]
    yield ""
    yield from lines[1 + len(rows) :]
    yield ""
    yield _tell_bits(found)


def _tell_bits(found: Sequence[ListedRun]) -> str:
    groups: dict[str, list[str]] = {}
    for run in found:
        if run.weights_sha256:
            groups.setdefault(run.weights_sha256, []).append(run.name)
    same = [" and ".join(names) for names in groups.values() if len(names) > 1]
    if len(found) == len(next(iter(groups.values()), [])):
        return "all end with the same weights, bit for bit; `lockstep verify` compares every step"
    unfinished = "" if all(run.weights_sha256 for run in found) else "; what is not finished has no hash yet"
    return f"the same weights, bit for bit: {'; '.join(same) or 'no two of them'}{unfinished}"


def _align(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def _short(value: Any) -> str:
    if isinstance(value, bool):
        value = str(value).lower()  # as it is set
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 1]}…"


def _percent(value: float | None) -> str:
    return _NOTHING if value is None else f"{100 * value:.2f} %"


def _number(value: float | None) -> str:
    return _NOTHING if value is None else f"{value:.4f}"


def _time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.1f} MB"
