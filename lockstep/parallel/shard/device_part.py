"""Some blocks of a program of fused or compiled kernels, whose weights are in tables together.

A stage of a pipeline is one part. With shard=parameters it is several: the parameters of a part are gathered
before it computes, fill its tables, and both are freed before those of the next part come.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn

from lockstep.lower.program import DeviceLowering, PartNetwork, Program, fill_weights, names_in
from lockstep.parallel.shard.gathered_model import GatheredModel, Use


@dataclass(frozen=True, eq=False)
class DevicePart:
    """Neighbouring blocks of a program, with networks of their own."""

    lowering: DeviceLowering

    @property
    def program(self) -> Program:
        return self.lowering.program

    def own(self, names: Iterable[str]) -> list[str]:
        """Those of the names of parameters and buffers that are in its blocks."""
        return names_in(self.program, names)


def find_parts(model: nn.Module, whole: DeviceLowering, own: range, most_mb: float) -> list[DevicePart]:
    """Some blocks as parts with at most so many megabytes of parameters, or one block."""
    sizes = {name: p.numel() * p.element_size() for name, p in model.named_parameters() if not p.is_meta}
    runs: list[range] = []
    filled = 0.0
    for place in own:
        size = sum(sizes[name] for name in sizes if whole.program.blocks[place].has(name))
        if runs and filled + size <= most_mb * 1e6:
            runs[-1] = range(runs[-1].start, place + 1)
            filled += size
        else:
            runs.append(range(place, place + 1))
            filled = size
    return [DevicePart(whole.part(run)) for run in runs]


class PartTables:
    """The tables of the part that computes: of all parts of a stage only this one has weights in memory.

    Parts are used in the same order by all workers along `data`. A part that is used twice running, by one
    lane or by two, keeps its tables.
    """

    def __init__(self, gathered: GatheredModel, parts: Sequence[DevicePart], uses: Sequence[Use]) -> None:
        self._gathered, self._uses = gathered, dict(zip(parts, uses, strict=True))
        self._part: DevicePart | None = None
        self._held: tuple[Tensor, Tensor] | None = None

    def begin(self, uses: Sequence[Use]) -> None:
        """Start with no part; `uses` are those of all passes to come, gathered while one before is used."""
        self.drop()
        self._gathered.begin(uses)

    @contextmanager
    def filled(self, part: DevicePart, network: PartNetwork, backward: bool) -> Iterator[None]:
        """Give a network of a part its tables for a pass; weights stay until another part needs its own."""
        if self._part is not part:
            self.drop()
            self._gathered.use(self._uses[part])
            network.make_weights()
            fill_weights(part.program, network, self._gathered.model)
            self._part, self._held = part, (network.weights, network.copy)
        assert self._held is not None
        network.take_weights(*self._held)
        network.make_results(backward)
        try:
            yield
        finally:
            network.drop_tables()

    def pass_over(self, uses: Sequence[Use]) -> None:
        """Take part in what others need for a lane that this worker does not have."""
        self.drop()
        self._gathered.pass_over(uses)

    def end(self) -> None:
        """Keep only the share."""
        self.drop()
        self._gathered.use_nothing()

    def drop(self) -> None:
        """Free the tables."""
        self._part = self._held = None
