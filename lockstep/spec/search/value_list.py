"""Reads what a sweep's -o gives to a key: one value, several with commas between them, or a range."""

from __future__ import annotations

import re
from collections.abc import Iterator

from lockstep.errors import SpecError

_CLOSING = {"[": "]", "{": "}", "(": ")"}
_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_RANGE = re.compile(rf"({_NUMBER}?)\.\.({_NUMBER})")


def split_values(key: str, text: str) -> list[str]:
    """The texts between those commas that are in no brackets and no quotes."""
    parts = [""]
    for char, is_open in _walk(key, text):
        if char == "," and not is_open:
            parts.append("")
        else:
            parts[-1] += char
    found = [part.strip() for part in parts]
    if len(found) > 1 and not all(found):
        raise SpecError(
            f"-o {key}={text}: there is nothing between two commas, or after the last: remove one"
        )
    if len(found) > 1 and any(re.fullmatch(r"\d+@\d+", part) for part in found):
        raise SpecError(
            f"-o {key}={text}: what depends on the epoch is one value, so it needs quotes of its own: "
            f"-o '{key}=\"{text}\"'"
        )
    return found


def _walk(key: str, text: str) -> Iterator[tuple[str, bool]]:
    """Every character, and whether brackets or quotes are open there."""
    closing, quote = list[str](), ""
    for char in text:
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        elif char in _CLOSING:
            closing.append(_CLOSING[char])
        elif closing and char == closing[-1]:
            closing.pop()
        yield char, bool(closing or quote)
    if closing or quote:
        raise SpecError(f"-o {key}={text}: {(quote or closing[-1])} is missing at the end")


def read_range(key: str, text: str) -> tuple[float, float] | None:
    """The ends of a range such as 0.01..1; None if the text is none."""
    match = _RANGE.fullmatch(text)
    if not match or not match[1]:
        return None
    whole = all(re.fullmatch(r"[+-]?\d+", end) for end in match.groups())
    low, high = (int(end) if whole else float(end) for end in match.groups())
    if not 0 < low < high:
        raise SpecError(
            f"-o {key}={text}: a range is drawn from evenly by its logarithm: its ends must rise from above 0"
        )
    return low, high
