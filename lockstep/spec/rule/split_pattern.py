"""Which layers a plan's patterns name, by their names alone: for those who split them and who predict it."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from itertools import accumulate

DATA = ":data"  # at a pattern's end: such layers stay whole on every worker


def is_split(patterns: Sequence[str], name: str) -> bool:
    """Whether a layer of this name is split by channel; the first pattern that fits it decides."""
    first = next((pattern for pattern in patterns if fits_name(pattern, name)), DATA)
    return not first.endswith(DATA)


def fits_name(pattern: str, name: str) -> bool:
    """Whether a pattern fits a layer's name or a block's that it is in, or the end of one of them."""
    pattern = pattern.removesuffix(DATA)
    blocks = accumulate(name.split("."), lambda block, word: f"{block}.{word}")
    return any(fnmatchcase(block, pattern) or fnmatchcase(block, f"*.{pattern}") for block in blocks)
