"""A Sweep: what was asked of `lockstep sweep`, its combinations, and whether it may extend an earlier one."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from lockstep.errors import SpecError
from lockstep.spec.run_file import Table, parse_overrides, write_value

Point = dict[str, Any]  # a value for each key that is swept
_TRIES = 1000  # draws for each sample that is wanted, of which some may come twice
_DIGITS = 4  # of a number that is drawn
_LONGEST = 120  # characters of a run's name
_OTHERS = re.compile(r"[^\w.+=,@:%-]")  # characters that a run's name does without


@dataclass(frozen=True)
class Sweep:
    """Which keys have which values, and in which order combinations are tried."""

    recipe: str | None = None
    file: Table = field(default_factory=dict)  # what -c holds
    overrides: tuple[str, ...] = ()  # those with one value
    choices: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    seeds: tuple[int, ...] = ()  # of each combination; none: the Run's own
    search: str = "grid"
    samples: int = 0  # combinations drawn; 0: all of them
    seed: int = 0  # of the draws
    rungs: int = 0  # of halving
    keep: float = 0.0  # the share that goes on from each rung

    def __post_init__(self) -> None:
        if not (self.choices or self.ranges or self.seeds):
            raise SpecError(
                "nothing to sweep: give a key several values, as -o optimizer.lr=0.1,0.2, or several --seeds"
            )
        for key, values in self.choices.items():
            if twice := next((value for i, value in enumerate(values) if value in values[:i]), None):
                raise SpecError(f"-o {key}: {write_value(twice)} is there twice")
        if self.ranges and not self.samples:
            key, (low, high) = next(iter(self.ranges.items()))
            raise SpecError(
                f"-o {key}={low:g}..{high:g} is a range: give --search random --samples N, or values"
            )
        if len(set(self.seeds)) < len(self.seeds) or min(self.seeds, default=0) < 0:
            raise SpecError(f"--seeds {','.join(map(str, self.seeds))} must be different numbers from 0")
        if self.seeds and "seed" in self.keys:
            raise SpecError("-o seed and --seeds say the same: give one of them")

    @property
    def keys(self) -> list[str]:
        return [*self.choices, *self.ranges]

    def points(self) -> list[Point]:
        """The combinations, in the order in which they are tried."""
        return list(self._draw() if self.samples else self._grid())

    def _grid(self) -> Iterator[Point]:
        for values in itertools.product(*self.choices.values()):
            yield dict(zip(self.choices, values, strict=True))

    def _draw(self) -> Iterator[Point]:
        """Samples, none twice; each depends on the seed and its number alone: more samples hold fewer."""
        known = list[Point]()
        for number in range(_TRIES * self.samples):
            point = {key: self._pick(key, number) for key in self.keys}
            if point not in known:
                known.append(point)
                yield point
            if len(known) == self.samples:
                return
        raise SpecError(f"--samples {self.samples}: there are only {len(known)} combinations: use the grid")

    def _pick(self, key: str, number: int) -> Any:
        drawn = hashlib.sha256(f"{self.seed} {number} {key}".encode()).digest()
        share = int.from_bytes(drawn[:6], "big") / 2**48
        if key in self.choices:
            return self.choices[key][int(share * len(self.choices[key]))]
        low, high = self.ranges[key]
        value = low * (high / low) ** share
        return round(value) if isinstance(low, int) else float(f"{value:.{_DIGITS}g}")

    def label(self, key: str) -> str:
        """A key's short name, if no other key of the sweep has the same."""
        short = key.rpartition(".")[2]
        return short if [each.rpartition(".")[2] for each in self.keys].count(short) == 1 else key

    def name(self, point: Point, seed: int | None = None) -> str:
        """What a combination, or its run with this seed, is called; it can be a folder's name."""
        parts = [f"{self.label(key)}={tell_value(value)}" for key, value in point.items()]
        text = ",".join([*parts, *([] if seed is None else [f"seed={seed}"])])
        plain = _OTHERS.sub("_", text)[:_LONGEST]
        return plain if plain == text else f"{plain}~{hashlib.sha256(text.encode()).hexdigest()[:6]}"

    def check_extends(self, earlier: Sweep, name: str) -> None:
        """Refuse to go on with an earlier sweep that this one does not hold."""
        ours, theirs = self._fixed(), earlier._fixed()
        for what in dict.fromkeys([*theirs, *ours]):
            if ours.get(what) != theirs.get(what):
                raise SpecError(_refuse(name, what, theirs.get(what), ours.get(what)))
        self._check_values(earlier, name)

    def _fixed(self) -> Point:
        """All that an extension must leave as it is, by its name on the command line."""
        found: Point = {"RECIPE": self.recipe, "--search": self.search, "--seed": self.seed or None}
        found |= {"--rungs": self.rungs or None, "--keep": self.keep or None}
        for start, table in (("-c ", self.file), ("-o ", parse_overrides(self.overrides))):
            for section, row in table.items():
                rows = row.items() if isinstance(row, Mapping) else [("", row)]
                found |= {f"{start}{section}.{key}".rstrip("."): value for key, value in rows}
        return found

    def _check_values(self, earlier: Sweep, name: str) -> None:
        pairs = {key: (earlier.choices.get(key), self.choices.get(key)) for key in earlier.keys + self.keys}
        pairs["--seeds"] = (earlier.seeds or None, self.seeds or None)
        for key, (theirs, ours) in pairs.items():
            fixed = bool(self.samples) and key != "--seeds"  # what is drawn of a list depends on its length
            same = ours == theirs and self.ranges.get(key) == earlier.ranges.get(key)
            more = bool(ours and theirs) and all(value in (ours or ()) for value in theirs or ())
            if not same and (fixed or not more):
                raise SpecError(_refuse(name, key, *(_tell(each, key) for each in (earlier, self))))
        if self.samples < earlier.samples or bool(self.samples) != bool(earlier.samples):
            raise SpecError(_refuse(name, "--samples", earlier.samples or None, self.samples or None))

    def to_json(self) -> str:
        """The text of sweep.json."""
        return json.dumps(asdict(self), indent=1, default=str) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Sweep:
        """Read what `to_json` wrote; ValueError or TypeError if it is none."""
        table = json.loads(text)
        if not isinstance(table, dict) or table.keys() != {each.name for each in fields(cls)}:
            raise ValueError("it is not a sweep's")
        for key in ("overrides", "seeds"):
            table[key] = tuple(table[key])
        for key in ("choices", "ranges"):
            table[key] = {name: tuple(values) for name, values in table[key].items()}
        return cls(**table)


def tell_value(value: Any) -> str:
    """A value as people write it: text without quotes, a list with + between its items."""
    if isinstance(value, list | tuple):
        return "+".join(map(tell_value, value))
    return value if isinstance(value, str) else write_value(value)


def _tell(sweep: Sweep, key: str) -> str | None:
    if key in sweep.ranges:
        return "..".join(f"{end:g}" for end in sweep.ranges[key])
    values = sweep.seeds if key == "--seeds" else sweep.choices.get(key, ())
    return ",".join(map(write_value, values)) or None


def _refuse(name: str, what: str, theirs: object, ours: object) -> str:
    words = [f"no {what}" if each is None else f"{what}={each}" for each in (theirs, ours)]
    return (
        f"the sweep {name} was begun with {words[0]}, and this command has {words[1]}: give the same "
        "command, with more values or seeds if you like, or another --name"
    )
