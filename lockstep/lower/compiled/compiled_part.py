"""Executes some blocks of a compiled model in training for one lane, as a stage of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.kernels.triton.conv.tile_table import Table
from lockstep.lower.compiled.compiled_block import Heads
from lockstep.lower.compiled.compiled_network import CompiledModel, CompiledNetwork
from lockstep.spec import Train


class CompiledPart(CompiledNetwork):
    """Takes a lane's forward pass through its blocks, and later its backward pass."""

    def __init__(
        self, model: CompiledModel, lanes: int, train: Train, device: torch.device, table: Table
    ) -> None:
        super().__init__(model, lanes, train, device, table)
        self.make_results()

    def take_weights(self, weights: Tensor, copy: Tensor) -> None:
        super().take_weights(weights, copy)
        self._bind()

    def make_results(self, backward: bool = True) -> None:
        """Make the table of gradients, statistics, loss and right answers, which a backward pass writes."""
        self._found = self.zeros(self.layout.size if backward else 0, dtype=torch.float32)

    def drop_tables(self) -> None:
        super().drop_tables()
        self.make_results(backward=False)

    def enter(self, given: Sequence[Tensor]) -> None:
        """Take images [N, H, W, C], or what the part before has sent."""
        if self._model.is_first:
            self.x[0].copy_(given[0])
            self._given = [self.x[0].permute(0, 3, 1, 2)]
        else:
            self._given = [tensor.detach().requires_grad_() for tensor in given]

    def forward(self) -> None:
        """Compute the outputs of its blocks."""
        with self._by_compiler():
            self._outputs: Heads = self._run(self._given, range(self.lanes))

    def leave(self) -> list[Tensor]:
        """The output of the last block, then the logits of heads before it."""
        return [without_gaps(output.detach()) for output in self._outputs]

    def enter_back(self, given: Sequence[Tensor]) -> None:
        """Take the gradients of what `leave` gave."""
        self._grads = list(given)

    def backward(self) -> None:
        """Compute gradients; the last part begins with the loss."""
        lanes, inputs = range(self.lanes), [tensor for tensor in self._given if tensor.requires_grad]
        with self._by_compiler():
            if self._model.is_last:
                self._grads = self._score(self._outputs, slice(len(self.labels)), lanes, self._found)
            self._back = self._find_grads(self._outputs, self._grads, self._found, inputs)
        del self._outputs, self._given, self._grads

    def leave_back(self) -> list[Tensor]:
        """The gradients of what `enter` took."""
        return [without_gaps(grad) for grad in self._back]

    def sum_lanes(self, lanes: range, out: Tensor, bad: Tensor) -> None:
        """Copy what `backward` found."""
        out.copy_(self._found)


def without_gaps(tensor: Tensor) -> Tensor:
    """The tensor, or a copy if there are gaps between its elements."""
    if tensor.is_contiguous() or tensor.dim() != 4:
        return tensor.contiguous()
    return tensor.contiguous(memory_format=torch.channels_last)
