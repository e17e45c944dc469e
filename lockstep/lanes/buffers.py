"""The buffers of all modules of a session, such as running means: floating and integer ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn


class Buffers:
    """Looks buffers up by name each time, since a module may replace them."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules

    def all(self) -> list[Tensor]:
        """Floating buffers, then the others."""
        return [*self.floats(), *self.ints()]

    def floats(self) -> list[Tensor]:
        return [buffer for _, buffer in self._named(floating=True)]

    def ints(self) -> list[Tensor]:
        """Buffers that are not floating, such as counts."""
        return [buffer for _, buffer in self._named(floating=False)]

    def float_names(self) -> list[str]:
        return [name for name, _ in self._named(floating=True)]

    def int_names(self) -> list[str]:
        return [name for name, _ in self._named(floating=False)]

    @torch.no_grad()
    def restore(self, values: Sequence[Tensor]) -> None:
        """Give all buffers the values that `all` had."""
        for buffer, value in zip(self.all(), values, strict=True):
            buffer.copy_(value)

    def set(self, floats: Sequence[Tensor], ints: Sequence[Tensor]) -> None:
        """Give the buffers new values."""
        self.restore([*floats, *ints])

    def _named(self, floating: bool) -> list[tuple[str, Tensor]]:
        return [
            (f"{name}.{key}", buffer)
            for name, module in self._modules.items()
            for key, buffer in module.named_buffers()
            if buffer.is_floating_point() == floating
        ]
