"""Groups of parameters, each updated by one optimizer, and which of them have weight decay."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
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


def group_params(
    optimizer: Optimizer, shapes: Mapping[str, Sequence[int]], heads: Container[str]
) -> list[ParamGroup]:
    """The groups of an optimizer; for `muon` matrices, and the rest: norms, biases and what is in `heads`."""
    if RULES[optimizer.name].whole != "matrix":
        return [_group(optimizer, list(shapes), shapes)]
    is_matrix = {
        name: not is_norm_or_bias(name, len(shape)) and name not in heads for name, shape in shapes.items()
    }
    matrices, rest = ([name for name in shapes if is_matrix[name] == wanted] for wanted in (True, False))
    return [_group(optimizer, matrices, shapes), _group(_of_rest(optimizer), rest, shapes)]


def _of_rest(optimizer: Optimizer) -> Optimizer:
    """The optimizer of what is no matrix, beside `muon`."""
    options, name = optimizer.options, optimizer.options["rest"]
    own = {key: options[key] for key in RULES[name].keys}
    return Optimizer(name, options["rest_lr"], optimizer.weight_decay, own, optimizer.decay_norms)


def _group(optimizer: Optimizer, names: Sequence[str], shapes: Mapping[str, Sequence[int]]) -> ParamGroup:
    return ParamGroup(optimizer, tuple(names), tuple(tuple(shapes[name]) for name in names))
