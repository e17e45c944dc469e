"""Groups of parameters, each updated by one optimizer, and which of them have weight decay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lockstep.spec.rule.optimizer_rule import RULES, Rule, is_norm_or_bias
from lockstep.spec.run import Optimizer

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ParamGroup:
    """Parameters by name, with the shapes of the whole ones, of which a worker may have pieces."""

    optimizer: Optimizer
    names: tuple[str, ...]
    shapes: tuple[Shape, ...]

    @property
    def rule(self) -> Rule:
        return RULES[self.optimizer.name]

    @property
    def decayed(self) -> list[bool] | None:
        """Which parameters have weight decay, and a trust ratio if the rule has any; None: all of them."""
        if self.optimizer.decay_norms and not self.rule.whole:
            return None
        return [
            not is_norm_or_bias(name, len(shape)) for name, shape in zip(self.names, self.shapes, strict=True)
        ]


def group_params(optimizer: Optimizer, shapes: Mapping[str, Sequence[int]]) -> list[ParamGroup]:
    """The groups of an optimizer, of parameters in the model's order."""
    return [_group(optimizer, list(shapes), shapes)]


def _group(optimizer: Optimizer, names: Sequence[str], shapes: Mapping[str, Sequence[int]]) -> ParamGroup:
    return ParamGroup(optimizer, tuple(names), tuple(tuple(shapes[name]) for name in names))
