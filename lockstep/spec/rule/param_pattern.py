"""Patterns on the names of parameters: which are frozen, and which have a rate of their own.

A pattern fits a name, a block that it is in, or the end of one of them, as those of a plan do.
"""

from __future__ import annotations

import difflib
from collections.abc import Container, Iterable, Sequence
from itertools import accumulate

from lockstep.errors import SpecError
from lockstep.spec.rule.split_pattern import fits_name

HEAD = "head"  # also stands for the last layer of each head, whatever the model calls it


def fits_param(pattern: str, name: str, heads: Container[str]) -> bool:
    """Whether a pattern names a parameter; `heads` are the names of those whose size hangs on the classes."""
    return fits_name(pattern, name) or (pattern == HEAD and name in heads)


def split_rates(rates: Iterable[str]) -> list[tuple[str, float]]:
    """The pattern and the factor of each item of `optimizer.rates`."""
    found = []
    for item in rates:
        pattern, colon, text = item.rpartition(":")
        try:
            factor = float(text)
        except ValueError:
            colon = ""
        if not (colon and pattern):
            raise SpecError(f"optimizer.rates={item} must be PATTERN:FACTOR, such as head:10 or layer1*:0.1")
        if not 0 < factor < float("inf"):
            fix = f"to keep parameters as they are: model.freeze={pattern}"
            raise SpecError(f"optimizer.rates={item}: the factor must be above 0; {fix}")
        found.append((pattern, factor))
    return found


def find_factor(rates: Iterable[tuple[str, float]], name: str, heads: Container[str]) -> float:
    """The factor of a parameter's rate: that of the first pattern that fits it, else 1."""
    return next((factor for pattern, factor in rates if fits_param(pattern, name, heads)), 1.0)


def check_patterns(key: str, patterns: Iterable[str], names: Sequence[str], heads: Container[str]) -> None:
    """Refuse a pattern that fits none of these names; the error shows names like it."""
    for pattern in patterns:
        if any(fits_param(pattern, name, heads) for name in names):
            continue
        blocks = dict.fromkeys(block for name in names for block in _blocks(name))
        words = {word: block for block in blocks for word in (block.rpartition(".")[2], block)}
        near = difflib.get_close_matches(pattern.strip("*"), words, n=3, cutoff=0.5)
        shown = [words[word] for word in near] or [block for block in blocks if block.count(".") <= 1][:8]
        raise SpecError(f"{key}={pattern} fits no parameter that is trained; there are {', '.join(shown)}, …")


def _blocks(name: str) -> Iterable[str]:
    return accumulate(name.split("."), lambda block, word: f"{block}.{word}")
