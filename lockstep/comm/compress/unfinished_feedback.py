"""What a step leaves out, until all of the step is committed: then it takes the place of what was remembered.

Both are written whole, so they are exchanged and nothing is copied; on a GPU they are copied, as captured
steps know their places. Of what is free then, one of each name is kept for the next step.
"""

from __future__ import annotations

import torch
from torch import Tensor


class UnfinishedFeedback:
    """Tensors beside those that a Feedback has, by the lane."""

    def __init__(self) -> None:
        self._next: dict[int, tuple[dict[str, Tensor], dict[str, Tensor]]] = {}
        self._free: dict[str, Tensor] = {}

    def beside(self, lane: int, kept: dict[str, Tensor], names: list[str]) -> dict[str, Tensor]:
        """Tensors to write in this step, shaped as the remembered ones; the same again if a step failed."""
        if lane not in self._next:
            self._next[lane] = kept, {name: self._take(name, kept[name]) for name in names}
        return self._next[lane][1]

    def commit(self, bad: Tensor | None) -> None:
        """Let what was written be what is remembered; if a step may be bad it is copied."""
        copies = bad is not None or any(
            t.is_cuda for _, written in self._next.values() for t in written.values()
        )
        for kept, written in self._next.values():
            for name, tensor in written.items():
                if copies:
                    kept[name].copy_(tensor if bad is None else torch.where(bad, kept[name], tensor))
                else:
                    self._free.setdefault(name, kept[name])
                    kept[name] = tensor
        if not copies:
            self._next.clear()

    def _take(self, name: str, like: Tensor) -> Tensor:
        found = self._free.pop(name, None)
        return torch.zeros_like(like) if found is None else found
