"""The options of a model, read from its builder's signature, and the check of given values against them.

registry.build checks options here first, so that a model's code only gets values of the declared type.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from lockstep.errors import ModelError

Dropout = Annotated[float, "a number of at least 0 and below 1"]
"""The share of values that dropout zeroes in training."""


def builder_options(builder: Callable[..., Any]) -> tuple[str, ...]:
    """The keys that a builder takes: its keyword-only parameters."""
    parameters = inspect.signature(builder).parameters.values()
    return tuple(p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY)


def check_options(model_name: str, builder: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Raise ModelError for the first key that the builder lacks or value that its type excludes."""
    known = builder_options(builder)
    signed = builder.__init__ if inspect.isclass(builder) else builder
    hints = get_type_hints(signed, include_extras=True)
    for key, value in options.items():
        if key not in known:
            raise ModelError(unknown_key(model_name, key, known))
        rule = broken_rule(hints[key], value)
        if rule:
            raise ModelError(f"model.{key}={value!r}: {model_name} takes {rule} here")


def broken_rule(hint: Any, value: Any) -> str | None:
    """The rule that `value` breaks, in words, or None when it fits the annotation."""
    if get_origin(hint) is Literal:
        choices = get_args(hint)
        return None if value in choices else "one of " + ", ".join(repr(choice) for choice in choices)
    if hint is bool:
        return None if isinstance(value, bool) else "true or false"
    if hint == Dropout:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return None if is_number and 0 <= value < 1 else str(get_args(Dropout)[1])
    raise AssertionError(f"no rule for options of type {hint}")


def unknown_key(model_name: str, key: str, known: tuple[str, ...]) -> str:
    """The error line for an option that does not exist: the most similar key, then all keys."""
    if not known:
        return f"model.{key}: unknown key: {model_name} has no options, remove it"
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    hint = f"did you mean 'model.{near[0]}'? " if near else ""
    return f"model.{key}: unknown key: {hint}{model_name} takes {', '.join(known)}"
