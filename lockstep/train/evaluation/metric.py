"""Metrics of the user's: functions of outputs and targets, over all blocks of an evaluation.

A metric gives the mean over the samples of a block; or a pair (numerators, denominators), each summed over
all blocks before they are divided, as for the IoU of each class.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from lockstep.comm.group import Group
from lockstep.comm.tree import tree_sum
from lockstep.data import Store
from lockstep.errors import ModelError
from lockstep.kernels.structure import as_float, place
from lockstep.models.tensors import buffers_kept

Metrics = Mapping[str, Callable[[Any, Any], Any]]
Row = dict[str, list[list[float]]]  # of a block: the numerators and the denominators of each metric


def measure_block(metrics: Metrics, outputs: Any, targets: Any, samples: int) -> Row:
    """The metrics of one block."""
    row = {}
    for name, function in metrics.items():
        found = function(outputs, targets)
        try:
            pair = found if isinstance(found, tuple) else (torch.as_tensor(found).double() * samples, samples)
            above, below = (torch.as_tensor(part).detach().double().flatten().tolist() for part in pair)
        except (TypeError, ValueError, RuntimeError):
            above = below = []
        if len(above) != len(below) or not above or (len(above) > 1 and not isinstance(found, tuple)):
            what = f"{len(above)} values" if above else f"a {type(found).__name__}"
            raise ModelError(
                f"metrics: '{name}' gives {what}: it must give one number, the mean over the block's "
                "samples; or a pair (numerators, denominators) of equal length"
            )
        row[name] = [above, below]
    return row


def sum_blocks(group: Group, rows: list[Row], num_blocks: int) -> dict[str, float]:
    """The metrics over all blocks, summed in a fixed order; a collective. Worker r has every W-th block.

    One that is not finite is left out.
    """
    every = [json.loads(text) for text in group.all_gather_bytes(json.dumps(rows).encode())]
    ordered = [every[number % group.size][number // group.size] for number in range(num_blocks)]
    found = {}
    for name in ordered[0]:
        above, below = tree_sum(torch.tensor([row[name] for row in ordered], dtype=torch.float64))
        there = below != 0  # a class that no sample has does not count
        found[name] = float((above[there] / below[there]).mean()) if there.any() else 0.0
    return {name: value for name, value in found.items() if math.isfinite(value)}


@torch.no_grad()
def check_metrics(metrics: Metrics, model: nn.Module, store: Store, device: torch.device) -> None:
    """Try the metrics on two samples, so that one that does not fit is refused at once."""
    if not (isinstance(metrics, Mapping) and all(map(callable, metrics.values()))):
        raise ModelError(
            "metrics: give a dict of names and functions of (outputs, targets), as {'dice': dice}"
        )
    for name in metrics:
        if not (isinstance(name, str) and name.isidentifier()) or name in ("loss", "accuracy"):
            raise ModelError(
                f"metrics: {name!r} is no name for a metric: take one word, other than loss and accuracy"
            )
    if not metrics:
        return
    ids = torch.arange(min(2, len(store.test)))
    images = torch.zeros(len(ids), *store.eval_shape, device=device)
    targets = place(store.test.read(ids)[1], device)
    with buffers_kept(model):
        outputs = as_float(model.eval()(images))
    for name, function in metrics.items():
        try:
            measure_block({name: function}, outputs, targets, len(ids))
        except ModelError:
            raise
        except Exception as error:
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ModelError(f"metrics: '{name}' fails on {len(ids)} samples: {first}") from error
