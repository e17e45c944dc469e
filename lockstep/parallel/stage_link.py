"""How neighbouring stages of a pipeline pass tensors on, while they compute: sent and received by threads.

An activation goes to the next stage, its gradient back to the one before. Tensors keep their strides, since
kernels choose their algorithm by them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lockstep.comm.background import BackgroundThread
from lockstep.comm.mesh import Mesh
from lockstep.parallel.tensor_form import Form, flat, form_of

_LENGTH = 8  # bytes of a length
_FROM, _TO = 0, 1  # the ranks of a way's two ends


class StageLink:
    """The neighbours of one stage; every message is sent and received in the order of calls."""

    def __init__(self, mesh: Mesh, device: torch.device) -> None:
        self._ways, self._stage, self._device = mesh.ways, mesh.pipeline.rank, device
        self._threads: dict[str, BackgroundThread[object]] = {}
        self._sent: list[Future[object]] = []
        self.num_bytes = 0  # sent so far

    def send(self, to: int, tensors: Sequence[Tensor]) -> None:
        """Send tensors without gaps to another stage; returns at once, so they must not be changed later."""
        pieces = [flat(tensor) for tensor in tensors]
        self.num_bytes += sum(piece.numel() * piece.element_size() for piece in pieces)
        self._queue_send(to, pieces)

    def receive(self, source: int, forms: Callable[[], Sequence[Form]]) -> Future[list[Tensor]]:
        """Tensors from another stage, received while this one computes; `forms` is asked when it is time."""
        return self._thread(f"from {source}").submit(partial(self._receive, source, forms))  # type: ignore[return-value]

    def send_text(self, to: int, text: object) -> None:
        """Send what JSON can hold."""
        message = json.dumps(text).encode()
        parts = [len(message).to_bytes(_LENGTH, "little"), message]
        pieces = [torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts]
        self._queue_send(to, pieces)

    def receive_text(self, source: int) -> object:
        """What `send_text` sent; inside a thread that receives."""
        group, length = self._ways[source, self._stage], torch.zeros(_LENGTH, dtype=torch.uint8)
        group.recv(length, _FROM)
        message = torch.zeros(int.from_bytes(length.numpy().tobytes(), "little"), dtype=torch.uint8)
        group.recv(message, _FROM)
        return json.loads(message.numpy().tobytes())

    def flush(self) -> None:
        """Wait until everything is sent."""
        while self._sent:
            self._sent.pop(0).result()

    def close(self) -> None:
        """End the threads."""
        for thread in self._threads.values():
            thread.close()

    def _receive(self, source: int, forms: Callable[[], Sequence[Form]]) -> list[Tensor]:
        found = [form.empty(self._device) for form in forms()]
        for tensor in found:
            self._ways[source, self._stage].recv(flat(tensor), _FROM)
        return found

    def _queue_send(self, to: int, pieces: Sequence[Tensor]) -> None:
        def send() -> None:
            for piece in pieces:
                self._ways[self._stage, to].send(piece, _TO)

        self._sent.append(self._thread(f"to {to}").submit(send))

    def _thread(self, name: str) -> BackgroundThread[object]:
        if name not in self._threads:
            self._threads[name] = BackgroundThread(f"stage {name}", self._device)
        return self._threads[name]


class Passage:
    """Tensors to or from one neighbour; the sender tells their forms before the first ones, once."""

    def __init__(self, link: StageLink, neighbour: int) -> None:
        self._link, self._neighbour = link, neighbour
        self.forms: list[Form | None] | None = None  # None for one that is not there; unknown at first

    def send(self, tensors: Sequence[Tensor | None]) -> None:
        """Send tensors without gaps, which must not be changed later; of the same forms every time."""
        forms = [None if tensor is None else form_of(tensor) for tensor in tensors]
        if self.forms is None:
            self.forms = forms
            self._link.send_text(self._neighbour, [form and form.dump() for form in forms])
        assert forms == self.forms, "tensors of other forms than those of the first lane"
        self._link.send(self._neighbour, [tensor for tensor in tensors if tensor is not None])

    def receive(self) -> Future[list[Tensor]]:
        """The next tensors that the neighbour sends, without those that are not there."""
        return self._link.receive(self._neighbour, self._ask)

    def _ask(self) -> list[Form]:
        if self.forms is None:
            told: Any = self._link.receive_text(self._neighbour)
            self.forms = [form and Form.load(form) for form in told]
        return [form for form in self.forms if form]
