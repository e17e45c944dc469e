"""Checks the type of each value of a Run by its annotation, and converts nothing; errors name the field."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

from lockstep.errors import SpecError, unknown

_LARGEST = sys.float_info.max


def check_fields(value: Any, section: str) -> None:
    """Check every field of a frozen dataclass against its annotation; ints in float fields become floats."""
    hints = get_type_hints(type(value))
    for item in fields(value):
        key = f"{section}.{item.name}" if section else item.name
        object.__setattr__(value, item.name, _accept(key, getattr(value, item.name), hints[item.name]))


def _accept(key: str, value: Any, kind: Any) -> Any:
    if isinstance(kind, type) and is_dataclass(kind):
        return _expect(key, value, isinstance(value, kind), f"a {kind.__name__}")
    if kind is bool:
        return _expect(key, value, isinstance(value, bool), "true or false")
    if kind is int:
        return _expect(key, value, isinstance(value, int) and not isinstance(value, bool), "a whole number")
    if kind is float:
        return accept_number(key, value)
    if kind is str:
        return _expect(key, value, isinstance(value, str), "text")
    if kind == str | None:
        return _expect(key, value, value is None or isinstance(value, str), "text")
    if kind == tuple[str, ...]:
        return _accept_names(key, value)
    return dict(_expect(key, value, isinstance(value, Mapping), "a table"))


def accept_number(key: str, value: Any) -> float:
    """Return a finite number as a float."""
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and -_LARGEST <= value <= _LARGEST
    return float(_expect(key, value, good, "a finite number"))


def fill_options(section: str, value: Any, table: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The own options of a section, which hang on its name: the given ones, and defaults for the others.

    Where the default is text, any value is left as it is.
    """
    if value.name not in table:
        raise SpecError(f"{section}.name: {unknown(section, value.name, table)}")
    defaults = table[value.name]
    for key in value.options:
        if key not in defaults:
            common = [item.name for item in fields(value) if item.name != "options"]
            raise SpecError(f"{section}: {unknown('key', key, (*common, *defaults))} (for {value.name})")
    found = {**defaults, **value.options}
    return {
        key: found[key] if isinstance(default, str) else accept_number(f"{section}.{key}", found[key])
        for key, default in defaults.items()
    }


def _accept_names(key: str, value: Any) -> tuple[str, ...]:
    """Return a list of names as a tuple; on the command line, it may be one text with commas."""
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    good = isinstance(value, (list, tuple)) and all(isinstance(part, str) for part in value)
    return tuple(_expect(key, value, good, "a list of names"))


def _expect(key: str, value: Any, holds: bool, rule: str) -> Any:
    if not holds:
        raise SpecError(f"{key}={value!r} must be {rule}, not {type(value).__name__}")
    return value


def require(holds: bool, key: str, value: object, rule: str) -> None:
    """Refuse a value that breaks a rule."""
    if not holds:
        raise SpecError(f"{key}={value} {rule}")


def require_choice(key: str, value: str, choices: tuple[str, ...]) -> None:
    """Refuse a word that is not one of the choices; the error suggests the nearest."""
    if value not in choices:
        raise SpecError(f"{key}: {unknown('value', value, choices)}")


def require_range(key: str, value: float, low: float, high: float) -> None:
    """Refuse a number below `low`, or from `high` on."""
    require(low <= value < high, key, value, f"must be at least {low:g} and below {high:g}")
