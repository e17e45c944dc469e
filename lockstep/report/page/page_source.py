"""Finds the runs, records and plans that `lockstep report` names: run directories, folders of them, files."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from lockstep.errors import BadInput
from lockstep.report.page.shown_plans import ShownPlans, are_plans, read_shown_plans
from lockstep.report.page.shown_run import Damaged, ShownRun, read_run
from lockstep.spec.record import Record, read_records

_OF_A_RUN = ("identity.json", "run.toml", "metrics.jsonl")
_OF_A_SWEEP = "sweep.json"  # its runs lie beside it


@dataclass
class PageSource:
    """What the page shows, and one line for each thing that is left out."""

    runs: list[ShownRun] = field(default_factory=list)
    records: dict[str, list[Record]] = field(default_factory=dict)  # by the file's name
    plans: list[ShownPlans] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def count(self) -> str:
        """How much of each there is, in words."""
        counts = {"run": len(self.runs), "record": sum(map(len, self.records.values()))}
        counts["prediction"] = len(self.plans)
        words = [f"{count:,} {what}{'s' * (count != 1)}" for what, count in counts.items() if count]
        return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))

    def add_run(self, path: Path) -> None:
        if any(run.path.resolve() == path.resolve() for run in self.runs):
            return
        try:
            self.runs.append(read_run(path))
        except Damaged as error:
            self.left_out.append(str(error))

    def add_file(self, path: Path) -> None:
        """Read a file of records or of plans; Damaged says what it is not."""
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise Damaged(f"{path}: cannot be read: {error.strerror}") from None
        except (ValueError, RecursionError):
            raise Damaged(f"{path}: neither a list of records nor plans, as it is no JSON") from None
        if are_plans(found):
            if all(each.path.resolve() != path.resolve() for each in self.plans):
                self.plans.append(read_shown_plans(path, found))
        elif isinstance(found, list):
            name = path.stem if path.stem not in self.records else str(path)
            self.records[name] = _read_list(path)
        else:
            raise Damaged(f"{path}: neither a list of records nor what `lockstep plan --json` prints")


def read_sources(words: Sequence[str], runs_dir: Path) -> PageSource:
    """Read all that the words name; BadInput if one names nothing, or if nothing is left."""
    found = PageSource()
    for word, paths in [(word, (Path(word), runs_dir / word)) for word in words]:
        run = next((path for path in paths if any((path / name).is_file() for name in _OF_A_RUN)), None)
        if run:
            found.add_run(run)
        elif folder := next((path for path in paths if path.is_dir()), None):
            _add_folder(found, folder)
        elif paths[0].is_file():
            try:
                found.add_file(paths[0])
            except Damaged as error:
                raise BadInput(str(error)) from None
        else:
            raise BadInput(
                f"no run '{word}': neither {paths[0]} nor {paths[1]} is a run's directory, a folder "
                "with runs, or a file of records or plans"
            )
    if not (found.runs or found.records or found.plans):
        why = f": {'; '.join(found.left_out)}" if found.left_out else ""
        raise BadInput(f"nothing to show in {', '.join(words)}{why}")
    found.runs = _name_apart(found.runs)
    return found


def _add_folder(found: PageSource, folder: Path) -> None:
    """The runs and the files of records and plans that lie in a folder."""
    for path in sorted(folder.iterdir()):
        if path.is_dir() and any((path / name).is_file() for name in _OF_A_RUN):
            found.add_run(path)
        elif (path / _OF_A_SWEEP).is_file():
            _add_folder(found, path)
        elif path.suffix == ".json" and path.is_file() and path.name != _OF_A_SWEEP:
            try:
                found.add_file(path)
            except Damaged as error:
                found.left_out.append(str(error))


def _read_list(path: Path) -> list[Record]:
    try:
        found = _check_records(read_records(path))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise Damaged(f"{path}: holds no records: {' '.join(str(error).split())[:120]}") from None
    if not found:
        raise Damaged(f"{path}: holds no records: the list is empty")
    return found


def _check_records(records: list[Record]) -> list[Record]:
    for record in records:
        numbers = (record.value, record.n, *record.spread)
        if len(numbers) != 4 or not all(isinstance(number, int | float) for number in numbers):
            raise ValueError(f"value, n or spread of '{record.name}' is not a number")
        texts = (record.name, record.unit, record.hardware, record.command, record.commit)
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(f"a text of '{record.name}' is not one")
    return records


def _name_apart(runs: list[ShownRun]) -> list[ShownRun]:
    """Runs of one name get that of their folder before it, then a number."""
    names = Counter(run.name for run in runs)
    longer = [
        replace(run, name=f"{run.path.resolve().parent.name}/{run.name}") if names[run.name] > 1 else run
        for run in runs
    ]
    names, seen = Counter(run.name for run in longer), Counter[str]()
    for place, run in enumerate(longer):
        seen[run.name] += 1
        if names[run.name] > 1:
            longer[place] = replace(run, name=f"{run.name} ({seen[run.name]})")
    return longer
