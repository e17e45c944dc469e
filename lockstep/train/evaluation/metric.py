"""Metrics beside loss and accuracy: functions of outputs and targets, over all samples of a split.

A metric gets a block of samples and gives the mean over them; or a pair (numerators, denominators), each
summed over all blocks before they are divided, as for the IoU of each class. One that has the attribute
`whole_split = True` gets all samples at once, in the order of the split, on the CPU, and gives a number.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from lockstep.comm.group import Group
from lockstep.comm.tree import tree_sum
from lockstep.data import Split, Store
from lockstep.errors import ModelError
from lockstep.kernels.structure import as_float, leaves, map_tensors, zip_tensors
from lockstep.models.tensors import buffers_kept

Metric = Callable[[Any, Any], Any]
Metrics = Mapping[str, Metric]
_TRIED = 64  # samples of a split on which a metric of all of it is tried


def takes_whole_split(function: Metric) -> bool:
    """Whether a metric is a function of all samples at once."""
    return bool(getattr(function, "whole_split", False))


@dataclass
class Measured:
    """What the metrics are made of: sums of each block of this worker; outputs, where all are needed."""

    metrics: Metrics
    rows: list[dict[str, list[list[float]]]] = field(default_factory=list)  # numerators, denominators
    blocks: list[tuple[Any, Any]] = field(default_factory=list)  # outputs and targets

    def add(self, outputs: Any, targets: Any, samples: int) -> None:
        """Take this worker's next block."""
        whole = {name for name, function in self.metrics.items() if takes_whole_split(function)}
        parts = {name: function for name, function in self.metrics.items() if name not in whole}
        self.rows.append({name: _sums(name, f(outputs, targets), samples) for name, f in parts.items()})
        if whole:
            self.blocks.append((_on_cpu(outputs), _on_cpu(targets)))

    def gather(self, group: Group, num_blocks: int) -> dict[str, float]:
        """The metrics over all blocks, the same at any number of workers; a collective.

        Worker r has every W-th block. A metric that is not finite is left out.
        """
        if not self.metrics:
            return {}
        every = [json.loads(text) for text in group.all_gather_bytes(json.dumps(self.rows).encode())]
        ordered = [every[number % group.size][number // group.size] for number in range(num_blocks)]
        found = self._gather_whole(group, num_blocks)
        for name in ordered[0]:
            above, below = tree_sum(torch.tensor([row[name] for row in ordered], dtype=torch.float64))
            there = below != 0  # a class that no sample has does not count
            found[name] = float((above[there] / below[there]).mean()) if there.any() else 0.0
        return {name: found[name] for name in self.metrics if math.isfinite(found[name])}

    def _gather_whole(self, group: Group, num_blocks: int) -> dict[str, float]:
        """Those of the whole split: worker 0 computes them, and tells the others."""
        whole = {name: f for name, f in self.metrics.items() if takes_whole_split(f)}
        if not whole:
            return {}
        mine = {f"{i:08} {j:04}": part for i, block in enumerate(self.blocks) for j, part in _numbered(block)}
        every = group.all_gather_bytes(save(mine))
        told: dict[str, Any] = {}
        if group.rank == 0:
            outputs, targets = _join(self.blocks[0], every, num_blocks)
            try:
                told = {name: _number(name, f(outputs, targets)) for name, f in whole.items()}
            except Exception as error:
                told = {"": f"metrics: {', '.join(whole)}: {_first_line(error)}"}
        found: dict[str, Any] = json.loads(group.broadcast_bytes(json.dumps(told).encode()))
        if "" in found:
            raise ModelError(found[""])
        return found


def _on_cpu(value: Any) -> Any:
    return map_tensors(Tensor.cpu, value)


def _numbered(block: tuple[Any, Any]) -> list[tuple[int, Tensor]]:
    return list(enumerate(part.clone(memory_format=torch.contiguous_format) for part in leaves(block)))


def _join(like: tuple[Any, Any], every: Sequence[bytes], num_blocks: int) -> tuple[Any, Any]:
    """Outputs and targets of the split in its order, from the blocks of all workers."""
    files, size, count = [load(each) for each in every], len(every), len(leaves(like))
    places = [(files[n % size], n // size) for n in range(num_blocks)]
    columns = iter([torch.cat([file[f"{i:08} {j:04}"] for file, i in places]) for j in range(count)])
    joined: tuple[Any, Any] = zip_tensors(lambda _: next(columns), [like])
    return joined


def _sums(name: str, found: Any, samples: int) -> list[list[float]]:
    """A block's numerators and denominators."""
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
    return [above, below]


def _number(name: str, found: Any) -> float:
    with suppress(TypeError, ValueError, RuntimeError):
        return float(found)
    raise ModelError(f"metrics: '{name}' gives a {type(found).__name__}: of a whole split it is one number")


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@torch.no_grad()
def check_metrics(metrics: Metrics, model: nn.Module, store: Store) -> None:
    """Try the metrics on a few samples, so that one that does not fit is refused at once."""
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
    split = store.chosen_by[1]
    some = _try_samples(model, split, min(2, len(split)), store)
    wants_more = any(map(takes_whole_split, metrics.values()))
    more = map(_on_cpu, _try_samples(model, split, min(_TRIED, len(split)), store)) if wants_more else some
    tried = {False: some, True: tuple(more)}
    for name, function in metrics.items():
        whole = takes_whole_split(function)
        outputs, targets = tried[whole]
        try:
            found = function(outputs, targets)
            _number(name, found) if whole else _sums(name, found, len(leaves(outputs)[0]))
        except ModelError:
            raise
        except Exception as error:
            if whole and isinstance(error, ValueError):
                continue  # it may need more of the split, as an area under a curve needs both classes
            count = len(leaves(outputs)[0])
            raise ModelError(f"metrics: '{name}' fails on {count} samples: {_first_line(error)}") from error


def _try_samples(model: nn.Module, split: Split, count: int, store: Store) -> tuple[Any, Any]:
    """Outputs for black images, as of `count` samples, and the targets of samples from all over the split."""
    device = next(model.parameters()).device
    targets = map_tensors(lambda t: t.to(device), split.read(torch.arange(count) * len(split) // count)[1])
    with buffers_kept(model):
        outputs = as_float(model.eval()(torch.zeros(min(2, count), *store.eval_shape, device=device)))
    rows = torch.arange(count, device=device) % 2
    return map_tensors(lambda found: found[rows], outputs), targets
