"""Which fully connected layers a plan names, pattern by pattern."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from lockstep.errors import ModelError
from lockstep.spec.rule.split_pattern import DATA, fits_name, is_split


def find_layers(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """The names of the layers to split, in the model's order; the first pattern that fits a layer decides."""
    linear = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    for pattern in (text.removesuffix(DATA) for text in patterns):
        if any(fits_name(pattern, name) for name in linear):
            continue
        known = any(fits_name(pattern, name) for name, _ in model.named_modules() if name)
        what = "fits no fully connected layer" if known else "fits no layer"
        others = ", ".join(linear) or "none"
        raise ModelError(
            f"plan.layers: '{pattern}' {what}, and only fully connected layers are split by channel; this "
            f"model has: {others}"
        )
    found = [name for name in linear if is_split(patterns, name)]
    if not found:
        raise ModelError(f"plan.layers={'/'.join(patterns)} leaves all layers whole: leave layers out")
    return found
