"""The optimizers of a state over the flat tables of a network: their memory, rates, marks of parameters.

A gradient's path ends here: backward → lane tree → optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from lockstep.kernels.triton.optimizer_update import (
    ALIGN,
    FlatGroup,
    FlatTables,
    Trust,
    step_values,
    update_flat,
)
from lockstep.lower.flat_table import Layout
from lockstep.lower.program import Program
from lockstep.runs.train_state import TrainState
from lockstep.spec.param_group import ParamGroup
from lockstep.train.update.muon import find_move
from lockstep.train.update.trust_ratio import trust_ratios


class FlatOptimizer:
    """Updates flat tables as `update_state` does the tensors of a state."""

    def __init__(
        self, state: TrainState, program: Program, layout: Layout, params: dict[str, Tensor], steps: int
    ) -> None:
        self._state, self._program, self._layout, self._params = state, program, layout, params
        self._device = next(iter(params.values())).device
        self._memory = {key: torch.zeros(layout.size, device=self._device) for key in state.memory}
        groups = [group for group in state.groups if group.names]
        self.groups = [self._begin(group, steps, group is groups[-1]) for group in groups]

    def update(self, tables: FlatTables) -> None:
        """Update all parameters by their gradients; statistics get their new values."""
        for group in self.groups:
            update_flat(tables, group)

    def fill(
        self, rates: Callable[[float], Sequence[float]], averaging: Sequence[float], updates: Sequence[int]
    ) -> None:
        """Set the numbers of an epoch's steps: `rates` gives those of a base rate; `updates` count from 0."""
        for group in self.groups:
            told = zip(rates(group.optimizer.lr), averaging, updates, strict=True)
            rows = [step_values(group.optimizer, lr, kept, n) for lr, kept, n in told]
            group.values.copy_(torch.tensor(rows))

    def memory(self) -> Iterator[tuple[list[Tensor], Tensor]]:
        """The state's memory of each kind, with the table that holds it; zeros of what has none of it."""
        for key, table in self._memory.items():
            known = self._state.memory[key]
            yield [known[n] if n in known else torch.zeros_like(p) for n, p in self._params.items()], table

    def _begin(self, group: ParamGroup, steps: int, is_last: bool) -> FlatGroup:
        chosen = dict(zip(group.names, group.decayed or [True] * len(group.names), strict=True))
        is_all = len(group.names) == len(self._params)
        return FlatGroup(
            group.optimizer,
            [self._memory[key] for key in group.rule.memory],
            torch.ones(steps, 6, device=self._device),  # not 0: Triton's interpreter warns of 0 / 0
            self._mark({name: int(on) for name, on in chosen.items()}) if group.decayed else None,
            None if is_all else self._mark(dict.fromkeys(group.names, 1), rest=int(is_last)),
            self._begin_trust(group, chosen) if group.rule.whole in ("gradient", "update") else None,
            self._orthogonalize(group) if group.rule.whole == "matrix" else None,
        )

    def _mark(self, numbers: dict[str, int], dtype: torch.dtype = torch.uint8, rest: int = 0) -> Tensor:
        """For every `ALIGN` values of a flat table, the number of their parameter; `rest` for statistics."""
        flat = torch.zeros(self._layout.size, device=self._device)
        marks = [torch.full_like(p, numbers.get(name, 0)) for name, p in self._params.items()]
        self._program.to_flat(self._layout, marks, flat)
        flat[self._layout.params :] = rest
        return flat.view(-1, ALIGN).amax(1).to(dtype)

    def _begin_trust(self, group: ParamGroup, chosen: dict[str, bool]) -> Trust | None:
        """Trust ratios of parameters other than norms and biases, found as through the host."""
        names = [name for name, has_ratio in chosen.items() if has_ratio]
        if not names:
            return None
        weights, others = (self._like_params() for _ in range(2))
        ratios = torch.ones(1 + len(names), device=self._device)

        def find(p: Tensor, g: Tensor) -> None:
            for flat, tensors in ((p, weights), (g, others)):
                self._program.from_flat(self._layout, flat, list(tensors.values()))
            ratios[1:] = trust_ratios(
                group.optimizer, [weights[name] for name in names], [others[name] for name in names]
            )

        owners = {name: place for place, name in enumerate(names, 1)}
        return Trust(self._mark(owners, torch.int32), ratios, find)

    def _orthogonalize(self, group: ParamGroup) -> Callable[[Tensor], None]:
        """A function that makes the matrices of a table orthogonal, one by one, as through the host."""
        found = self._like_params()

        def replace(g: Tensor) -> None:
            self._program.from_flat(self._layout, g, list(found.values()))
            for name, shape in zip(group.names, group.shapes, strict=True):
                found[name].copy_(find_move(found[name], shape))
            self._program.to_flat(self._layout, list(found.values()), g)

        return replace

    def _like_params(self) -> dict[str, Tensor]:
        return {name: torch.empty_like(p) for name, p in self._params.items()}
