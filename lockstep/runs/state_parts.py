"""A state that is dealt to workers: its tensors, one by one, into a file, to worker 0, or back to owners.

Nobody needs memory for more than its own part, a copy of it while it is written, and one tensor.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from lockstep.comm.group import Group
from lockstep.models.tensors import replace_tensors
from lockstep.runs.tensor_file import TensorEntry, TensorWriter, begin_tensors


@dataclass(frozen=True)
class StatePiece:
    """Elements of a tensor of the state from `start` on, flat; or all of it."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    start: int
    tensor: Tensor


@dataclass(frozen=True)
class _Place:
    rank: int
    start: int
    count: int


@dataclass(frozen=True)
class _Listed:
    """A tensor of the whole state: who has which part of it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    places: list[_Place]

    def empty(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype)

    @property
    def owners(self) -> list[_Place]:
        """The first worker that has each part."""
        return list({place.start: place for place in reversed(self.places)}.values())


class PartsFile:
    """A file that is being filled by workers, each with its parts; or by worker 0 with all of them."""

    def __init__(
        self,
        writer: TensorWriter | None,
        mine: set[tuple[str, int]],
        is_gathered: bool,
        error: OSError | None,
    ) -> None:
        self._writer, self._mine, self._error = writer, mine, error
        self.is_gathered = is_gathered  # worker 0 gets all parts, since not all workers see the file

    def chosen(self, own: Iterable[StatePiece]) -> list[StatePiece]:
        """Those pieces that this worker writes: of what several have, the first one's."""
        return [piece for piece in own if (piece.name, piece.start) in self._mine]

    def put(self, piece: StatePiece) -> None:
        """Write a piece, unless something failed before."""
        if self._writer and not self._error:
            self._error = _try(partial(self._writer.put, piece.name, piece.tensor, piece.start))

    def close(self) -> OSError | None:
        """Make what was written durable; gives the first error that there was."""
        failed = _try(self._writer.close) if self._writer else None
        return self._error or failed


class StateParts:
    """The parts of a state of all workers in `world`; those in `same` have the same layers."""

    def __init__(self, world: Group | None = None, same: Group | None = None) -> None:
        self._world, self.same = world or Group(), same or Group()
        self.known: dict[str, tuple[int, ...]] = {}  # the shapes of all tensors, once `shapes` was called

    def collect(self, own: Sequence[StatePiece]) -> Iterator[tuple[str, Tensor]]:
        """Every tensor in order of names, on the CPU: whole at worker 0, empty elsewhere; a collective."""
        world, mine = self._world, _by_place(own)
        for listed in self._listed(own):
            whole = listed.empty() if world.rank == 0 else torch.empty(0, dtype=listed.dtype)
            for place in listed.owners:
                if place.rank == world.rank:
                    part = _flat(mine[listed.name, place.start])
                    if place.rank:
                        world.send(part, 0)
                    else:
                        whole.view(-1)[place.start : place.start + place.count] = part
                elif world.rank == 0:
                    world.recv(whole.view(-1)[place.start : place.start + place.count], place.rank)
            yield listed.name, whole

    @property
    def is_shared(self) -> bool:
        """Whether other workers have parts, too."""
        return self._world.size > 1

    def open(self, own: Sequence[StatePiece], path: Path | None) -> PartsFile:
        """Begin one new file for all parts, for which worker 0 has a path; a collective."""
        world, listed = self._world, self._listed(own)
        entries = [TensorEntry(each.name, each.dtype, each.shape) for each in listed]
        error = _try(partial(_begin, path, entries)) if path else None
        target = str(path.absolute()) if path and not error else ""
        target = world.broadcast_bytes(target.encode()).decode()
        sees = bool(target) and os.access(target, os.R_OK | os.W_OK)
        all_see = all(world.all_gather_bytes(b"sees" if sees else b""))
        writer = TensorWriter(Path(target), entries) if sees else None
        mine = {
            (each.name, place.start) for each in listed for place in each.owners if place.rank == world.rank
        }
        return PartsFile(writer, mine if all_see else set(), bool(target) and not all_see, error)

    def gather(self, own: Sequence[StatePiece], file: PartsFile) -> None:
        """If not all workers see the file, let worker 0 write all parts, tensor by tensor; a collective."""
        for name, whole in self.collect(own) if file.is_gathered else ():
            if self._world.rank == 0:
                file.put(StatePiece(name, tuple(whole.shape), 0, whole))

    def agree(self, is_done: bool, error: OSError | None) -> tuple[bool, OSError | None]:
        """Whether all workers are done, and the error of the first that could not; a collective."""
        mine = [is_done, [error.errno, error.strerror or str(error)] if error else None]
        every = [json.loads(text) for text in self._world.all_gather_bytes(json.dumps(mine).encode())]
        return all(done for done, _ in every), next((OSError(*why) for _, why in every if why), None)

    def hand_out(self, own: Sequence[StatePiece], saved: Mapping[str, Tensor] | None) -> None:
        """Copy tensors that worker 0 has into the parts of all workers; a collective."""
        world, mine = self._world, _by_place(own)
        for listed in self._listed(own):
            whole = saved[listed.name].contiguous() if saved is not None else None
            for place in listed.places:
                if whole is not None:
                    part = whole.view(-1)[place.start : place.start + place.count]
                    if place.rank:
                        world.send(part, place.rank)
                elif place.rank == world.rank:
                    part = torch.empty(place.count, dtype=listed.dtype)
                    world.recv(part, 0)
                if place.rank == world.rank:
                    target = mine[listed.name, place.start]
                    target.detach().copy_(part.view(target.shape))

    def num_bytes(self, own: Sequence[StatePiece]) -> int:
        """Of the whole state; a collective."""
        return sum(TensorEntry(each.name, each.dtype, each.shape).num_bytes for each in self._listed(own))

    def shapes(self, own: Sequence[StatePiece]) -> dict[str, tuple[int, ...]]:
        """The shapes of all tensors of the whole state by name; a collective."""
        self.known = {listed.name: listed.shape for listed in self._listed(own)}
        return self.known

    def make_whole(
        self, model: nn.Module, own: Sequence[StatePiece], shared: Container[str], device: torch.device
    ) -> None:
        """Give every worker all parameters and buffers of the model, at the end of a run.

        `shared` are names of parameters of which every worker has pieces.
        """
        world, mine, arrived = self._world, _by_place(own), {}
        for listed in self._listed([piece for piece in own if piece.name.startswith("model.")]):
            whole = listed.empty().to(device)
            for place in listed.owners:
                part = whole.view(-1)[place.start : place.start + place.count]
                if place.rank == world.rank:
                    part.copy_(_flat(mine[listed.name, place.start]))
                world.broadcast(part, place.rank)
            arrived[listed.name.removeprefix("model.")] = whole

        def choose(name: str, tensor: Tensor) -> Tensor | None:
            return arrived[name] if tensor.is_meta or name in shared else None

        replace_tensors(model, choose)

    def _listed(self, own: Sequence[StatePiece]) -> list[_Listed]:
        """Every tensor in order of names, the same on every worker."""
        mine = [
            [p.name, list(p.shape), str(p.tensor.dtype).removeprefix("torch."), p.start, p.tensor.numel()]
            for p in own
        ]
        found: dict[str, _Listed] = {}
        for rank, text in enumerate(self._world.all_gather_bytes(json.dumps(mine).encode())):
            for name, shape, dtype, start, count in json.loads(text):
                listed = found.setdefault(name, _Listed(name, tuple(shape), getattr(torch, dtype), []))
                listed.places.append(_Place(rank, start, count))
        return [found[name] for name in sorted(found)]


def _begin(path: Path, entries: Sequence[TensorEntry]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    begin_tensors(path, entries)


def _by_place(own: Sequence[StatePiece]) -> dict[tuple[str, int], Tensor]:
    return {(piece.name, piece.start): piece.tensor for piece in own}


def _try(work: Callable[[], None]) -> OSError | None:
    try:
        work()
    except OSError as error:
        return error
    return None


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().view(-1)
