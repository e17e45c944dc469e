"""Reads TOML files and `-o key=value` overrides into a Run, refuses unknown keys, and writes a Run as TOML.

Layers are merged as plain tables (recipe, then file, then overrides) and checked once, at the end.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from lockstep.errors import SpecError, unknown
from lockstep.spec.rule.evaluated import Evaluate
from lockstep.spec.rule.loss_rule import OF_ONE_LOSS
from lockstep.spec.rule.update_rule import Optimizer, Schedule
from lockstep.spec.run import Checkpoint, Data, Kernels, Model, Run, Train

Table = dict[str, Any]
SECTIONS: dict[str, type] = {
    "model": Model,
    "data": Data,
    "train": Train,
    "optimizer": Optimizer,
    "schedule": Schedule,
    "kernels": Kernels,
    "checkpoint": Checkpoint,
    "evaluate": Evaluate,
}
_WITHIN = "growth"  # a field that is a part of train.batch in a file


def to_table(run: Run) -> Table:
    """A Run as nested tables; a section's options are put beside its other keys."""
    table: Table = {"seed": run.seed}
    for section in SECTIONS:
        value = getattr(run, section)
        row = {f.name: getattr(value, f.name) for f in fields(value) if f.name not in ("options", _WITHIN)}
        row.update(getattr(value, "options", {}))
        table[section] = {key: item for key, item in row.items() if item is not None}
    table["train"]["batch"] = run.train.batches
    return table


def from_table(table: Mapping[str, Any]) -> Run:
    """Check nested tables and make the Run; the error for an unknown key suggests the nearest known one."""
    for key in table:
        if key != "seed" and key not in SECTIONS:
            homes = [f"{section}.{key}" for section, kind in SECTIONS.items() if key in _names(kind)]
            hint = f" ({' or '.join(homes)} exists)" if homes else ""
            raise SpecError(unknown("key", key, ("seed", *SECTIONS)) + hint)
    parts: Table = {"seed": table["seed"]} if "seed" in table else {}
    for section, kind in SECTIONS.items():
        row = table.get(section, {})
        if not isinstance(row, Mapping):
            raise SpecError(f"{section}={row!r} must be a table: write [{section}] or {section}.KEY=VALUE")
        parts[section] = kind(**_split_options(section, kind, row))
    return Run(**parts)


def merge(base: Table, layer: Mapping[str, Any]) -> Table:
    """Overwrite keys of `base` by those of `layer`.

    A section whose `name` changes loses its old options; another `train.loss` drops keys of the old one.
    """
    merged = {key: dict(value) if isinstance(value, Mapping) else value for key, value in base.items()}
    for key, value in layer.items():
        old = merged.get(key)
        if not isinstance(value, Mapping) or not isinstance(old, Mapping):
            merged[key] = value
            continue
        if key in SECTIONS and value.get("name", old.get("name")) != old.get("name"):
            common = _names(SECTIONS[key])
            old = {name: item for name, item in old.items() if name in common}
        if key == "train" and value.get("loss", old.get("loss")) != old.get("loss"):
            old = {name: item for name, item in old.items() if name not in OF_ONE_LOSS}
        merged[key] = {**old, **value}
    return merged


def read_toml(path: Path) -> Table:
    """The tables of a TOML file; errors name the file and, if it is not valid TOML, the line."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise SpecError(f"{path}: cannot read the file: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SpecError(f"{path}: not a TOML file: {error}") from None


def speaks_of(message: str, table: Mapping[str, Any]) -> bool:
    """Whether an error message mentions a key of these tables, or an unknown name that is a value there."""
    return any(
        re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)|unknown key '{re.escape(key)}'", message)
        or re.search(rf"unknown [\w ]+ '{re.escape(str(value))}'", message)
        for name, key, value in _entries(table)
    )


def _entries(table: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """The name, key and value of everything in nested tables."""
    for section, row in table.items():
        if isinstance(row, Mapping):
            yield f"[{section}]", section, None
            yield from ((f"{section}.{key}", key, value) for key, value in row.items())
        else:
            yield section, section, row


def parse_overrides(items: Iterable[str]) -> Table:
    """Parse overrides such as `optimizer.lr=0.1` into nested tables."""
    table: Table = {}
    for item in items:
        path, equals, text = item.partition("=")
        names = path.strip().split(".")
        if not equals or len(names) > 2 or not all(names):
            raise SpecError(f"-o {item}: must be KEY=VALUE or SECTION.KEY=VALUE, like optimizer.lr=0.1")
        row = table if len(names) == 1 else table.setdefault(names[0], {})
        if not isinstance(row, dict):
            raise SpecError(f"-o {item}: '{names[0]}' is given both as a value and as a section")
        row[names[-1]] = parse_value(text.strip())
    return table


def dump_toml(run: Run) -> str:
    """The whole Run as TOML text, every key written out."""
    table = to_table(run)
    lines = [f"seed = {table.pop('seed')}"]
    for section, row in table.items():
        lines += ["", f"[{section}]", *(f"{_key(key)} = {write_value(item)}" for key, item in row.items())]
    return "\n".join(lines) + "\n"


def _split_options(section: str, kind: type, row: Mapping[str, Any]) -> Table:
    names = _names(kind)
    if "options" not in names:
        for key in row:
            if key not in names:
                raise SpecError(f"{section}: {unknown('key', key, names)}")
        return dict(row)
    common = {key: item for key, item in row.items() if key in names - {"options"}}
    return {**common, "options": {key: item for key, item in row.items() if key not in common}}


def _names(kind: type) -> set[str]:
    return {f.name for f in fields(kind) if f.name != _WITHIN}


def parse_value(text: str) -> Any:
    """Parse a text as a TOML value; other text is returned as it is, so that names need no quotes."""
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    return value if isinstance(value, (bool, int, float, str, list)) else text


def _key(key: str) -> str:
    bare = key.replace("_", "").replace("-", "").isalnum() and key.isascii()
    return key if bare else write_value(key)


def write_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(write_value(item) for item in value)}]"
    raise SpecError(f"{value!r} cannot be written to TOML: use numbers, text, booleans or lists of them")
