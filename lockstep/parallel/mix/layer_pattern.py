"""Which fully connected layers a plan names, pattern by pattern."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from itertools import accumulate

from torch import nn

from lockstep.errors import ModelError

DATA = ":data"  # at a pattern's end: such layers stay whole on every worker


def find_layers(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """The names of the layers to split, in the model's order; the first pattern that fits a layer decides."""
    linear = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    for pattern in (text.removesuffix(DATA) for text in patterns):
        if any(_fits(pattern, name) for name in linear):
            continue
        known = any(_fits(pattern, name) for name, _ in model.named_modules() if name)
        what = "fits no fully connected layer" if known else "fits no layer"
        others = ", ".join(linear) or "none"
        raise ModelError(
            f"plan.layers: '{pattern}' {what}, and only fully connected layers are split by channel; this "
            f"model has: {others}"
        )
    firsts = [(name, [p for p in patterns if _fits(p.removesuffix(DATA), name)][:1]) for name in linear]
    found = [name for name, first in firsts if first and not first[0].endswith(DATA)]
    if not found:
        raise ModelError(f"plan.layers={'/'.join(patterns)} leaves all layers whole: leave layers out")
    return found


def _fits(pattern: str, name: str) -> bool:
    """Whether a pattern fits a layer's name or a block's that it is in, or the end of one of them."""
    blocks = accumulate(name.split("."), lambda block, word: f"{block}.{word}")
    return any(fnmatchcase(block, pattern) or fnmatchcase(block, f"*.{pattern}") for block in blocks)
