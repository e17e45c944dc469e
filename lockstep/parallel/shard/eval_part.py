"""The parts of a stage in eval mode, with fused or compiled kernels, for one block of images at a time.

If parameters are shared, they are gathered part by part, and only the part that computes has weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn

from lockstep.lower.program import Load
from lockstep.parallel.shard.device_part import DevicePart
from lockstep.parallel.shard.gathered_model import GatheredModel, Use

if TYPE_CHECKING:
    from lockstep.lower.eval_network import EvalNetwork  # needs triton, which stock kernels do not


class EvalParts:
    """A network for each part; they are made when they are used first, since their weights are copied."""

    def __init__(self, parts: Sequence[DevicePart], gathered: GatheredModel | None, uses: list[Use]) -> None:
        self._parts, self._gathered, self._uses = parts, gathered, uses
        self._known: list[tuple[EvalNetwork, Load]] = []
        self._full: EvalNetwork | None = None  # the one that has weights, of those that are gathered

    @property
    def last(self) -> EvalNetwork:
        """The network of the last part."""
        return self._known[-1][0]

    def begin(self, model: nn.Module) -> None:
        """Take a model's weights, if all of them are there."""
        if self._gathered is None:
            for number in range(len(self._parts)):
                self._find(number)[1](model)

    def forward(self, model: nn.Module, given: Sequence[Tensor], sends: bool) -> list[Tensor]:
        """Compute a block; what the next stage needs, if this one `sends` it."""
        for number in range(len(self._parts)):
            network = self._fill(number, model) if self._gathered else self._known[number][0]
            network.enter(given)
            network.forward(training=False)
            given = network.leave() if sends or number < len(self._parts) - 1 else []
        return list(given)

    def end(self) -> None:
        """Free weights that were gathered."""
        if self._full:
            self._full.drop_tables()
        self._full = None

    def _fill(self, number: int, model: nn.Module) -> EvalNetwork:
        """The network of a part with its weights, which stay until another part needs its own."""
        assert self._gathered
        is_new = number == len(self._known)
        if is_new or self._full is not self._known[number][0]:
            self.end()
            self._gathered.use(self._uses[number])
            self._full, load = self._find(number)
            if not is_new:
                self._full.make_weights()
            load(model)
        return self._known[number][0]

    def _find(self, number: int) -> tuple[EvalNetwork, Load]:
        if number == len(self._known):
            self._known.append(self._parts[number].lowering.eval_network(1))
        return self._known[number]
