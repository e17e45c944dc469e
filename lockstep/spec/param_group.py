"""Groups of parameters, each updated by one optimizer, and which of them have weight decay."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace

from lockstep.spec.rule.optimizer_rule import RULES, Rule, is_norm_or_bias
from lockstep.spec.rule.param_pattern import find_factor, split_rates
from lockstep.spec.rule.update_rule import Optimizer

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
    """The groups of an optimizer; for `muon` matrices, and the rest: norms, biases and what is in `heads`.

    Each factor of `optimizer.rates` makes a group of its own.
    """
    if RULES[optimizer.name].whole != "matrix":
        return _by_rate(optimizer, optimizer, shapes, heads)
    is_matrix = {
        name: not is_norm_or_bias(name, len(shape)) and name not in heads for name, shape in shapes.items()
    }
    matrices, rest = (
        {name: shape for name, shape in shapes.items() if is_matrix[name] == wanted}
        for wanted in (True, False)
    )
    return [
        *_by_rate(optimizer, optimizer, matrices, heads),
        *_by_rate(optimizer, _of_rest(optimizer), rest, heads),
    ]


def _of_rest(optimizer: Optimizer) -> Optimizer:
    """The optimizer of what is no matrix, beside `muon`."""
    options, name = optimizer.options, optimizer.options["rest"]
    own = {key: options[key] for key in RULES[name].keys}
    return Optimizer(name, options["rest_lr"], optimizer.weight_decay, own, optimizer.decay_norms)


def _by_rate(
    whole: Optimizer, own: Optimizer, shapes: Mapping[str, Sequence[int]], heads: Container[str]
) -> list[ParamGroup]:
    """The groups of these parameters, which have the optimizer `own`, by the factors of `whole.rates`."""
    rates = split_rates(whole.rates)
    factors = {name: find_factor(rates, name, heads) for name in shapes}
    groups = []
    for factor in dict.fromkeys(factors.values()) or [1.0]:
        names = tuple(name for name in shapes if factors[name] == factor)
        optimizer = replace(own, lr=own.lr * factor, rates=())
        groups.append(ParamGroup(optimizer, names, tuple(tuple(shapes[name]) for name in names)))
    return groups
