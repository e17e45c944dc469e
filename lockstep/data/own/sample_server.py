"""A data process: reads samples of the user's data set, and writes them into memory that its parent shares.

Requests and answers are JSON over a socket; a request brings the memory as a descriptor. Nothing is pickled.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.data.sample import as_image, as_label, as_target
from lockstep.kernels.structure import describe, leaves
from lockstep.spec.start.stop_signal import STOPPING

REQUEST_BYTES = 1 << 16


@dataclass(frozen=True)
class SampleForm:
    """What every sample must be: the image in words, and a target alike."""

    image: str
    target: Any
    has_labels: bool

    @property
    def told(self) -> str:
        """Image and target in words."""
        return f"{self.image}; {describe(self.target)}"

    def parts(self) -> list[Tensor]:
        """The tensors of the target; of a label its number."""
        return [torch.tensor(0)] if self.has_labels else leaves(self.target)


def serve_samples(line: socket.socket, parts: Sequence[Any], begin: Callable[[], None]) -> None:
    """Answer requests until the parent closes the line; the process ends here."""
    code = 1
    try:
        for number in STOPPING:  # the parent ends this process when it has done with it
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
        begin()
        torch.set_num_threads(1)
        while True:
            message, fds, _, _ = socket.recv_fds(line, REQUEST_BYTES, 1)
            if not message:
                break
            line.send(json.dumps(_answer(parts, json.loads(message), fds[0])).encode())
        code = 0
    except OSError:
        pass  # the parent has ended
    finally:
        os._exit(code)


def _answer(parts: Sequence[Any], request: dict[str, Any], fd: int) -> dict[str, Any]:
    """Read the samples of a request; what went wrong with one, or nothing."""
    with mmap.mmap(fd, 0) as memory:
        os.close(fd)
        for place, index in zip(request["places"], request["indices"], strict=True):
            memory[request["mark"] : request["mark"] + 8] = place.to_bytes(8, "little")
            try:
                sample = parts[request["part"]][index]
            except BaseException as error:
                return {"place": place, "error": f"{type(error).__name__}: {error}".replace("\n", " ")[:2000]}
            found = _as_tensors(sample, request["has_labels"], request["told"])
            if found is None:
                return {"place": place, "error": None}
            for tensor, start in zip(found, request["starts"], strict=True):
                _write(memory, tensor, start + place * tensor.nbytes)
    return {}


def _as_tensors(sample: Any, has_labels: bool, told: str) -> list[Tensor] | None:
    """Image and parts of the target; None if they are not as they should be."""
    try:
        image, target = sample
        image, target = as_image(image), as_label(target) if has_labels else as_target(target)
        if f"{describe(image)}; {describe(target)}" != told:
            return None
        return [image, torch.tensor(target)] if has_labels else [image, *leaves(target)]
    except (TypeError, ValueError, RuntimeError):
        return None


def _write(memory: mmap.mmap, tensor: Tensor, start: int) -> None:
    if tensor.numel():
        shared = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=start)
        shared.view(tensor.shape).copy_(tensor)
