"""Freezes the parameters that `model.freeze` names, and the batch norms that have no others.

It follows registry.build. A frozen parameter needs no gradient, so none is computed, exchanged or applied.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from lockstep.errors import SpecError
from lockstep.models.weights import head_names
from lockstep.spec.rule.param_pattern import check_patterns, fits_param


def freeze_parts(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze what the patterns name; a batch norm all of whose parameters are frozen stays in eval mode."""
    if not patterns:
        return
    heads, named = head_names(model), dict(model.named_parameters())
    check_patterns("model.freeze", patterns, list(named), heads)
    for name, parameter in named.items():
        if any(fits_param(pattern, name, heads) for pattern in patterns):
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in named.values()):
        told = ",".join(patterns)
        raise SpecError(f"model.freeze={told} fits every parameter, so nothing would be trained: name fewer")
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._NormBase) and _is_frozen(module):
            module.eval()
            module.train = _stay  # type: ignore[assignment]  # also of a copy of the model


def trains_norms(model: nn.Module) -> bool:
    """Whether a batch norm takes its statistics from the samples of a lane."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    return any(vars(norm).get("train") is not _stay for norm in norms)


def _is_frozen(module: nn.Module) -> bool:
    params = list(module.parameters(recurse=False))
    return bool(params) and not any(parameter.requires_grad for parameter in params)


def _stay(mode: bool = True) -> None:
    """In the place of a frozen norm's `train`: it keeps its statistics, and normalizes by them."""
