"""All lanes of a small chain of layers at once, with stock kernels.

Forward and the data gradient run over all lanes in one call; only what reduces over samples, the weight
gradients and the loss, is computed lane by lane and summed in the lane tree. On small layers the calls
cost more than the arithmetic, so this is what keeps lanes cheap there. It rests on a sample's result not
depending on the batch it is in, which stock kernels do not promise: `same_bits` finds out.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from lockstep.comm.tree import LaneTree
from lockstep.data.loader import Lanes
from lockstep.kernels.conv import lane_conv2d
from lockstep.kernels.linear import lane_linear
from lockstep.models.block import BlockModel
from lockstep.train.lane import LaneByLane, LaneOutput
from lockstep.train.loss import Loss

_SMALL_BYTES = 16 << 20  # of the largest activation; above it one lane at a time stays in the cache
_PER_SAMPLE = (nn.ReLU, nn.Sigmoid, nn.Tanh, nn.MaxPool2d, nn.AvgPool2d, nn.Flatten, nn.Identity)


class Together(LaneByLane):
    """Runs the lanes of a chain of layers together."""

    def __init__(self, model: nn.Module, loss: Loss, seed: int, chain: list[nn.Module]) -> None:
        super().__init__(model, loss, seed, bf16=False)
        self._chain = chain

    def run(self, lanes: Lanes, step: int) -> Iterator[LaneOutput]:
        """One output: the sum over the whole tree."""
        self.model.train()
        logits = lanes.images
        for layer in self._chain:
            logits = _apply(layer, logits, lanes.num_lanes)
        size = len(lanes.labels) // lanes.num_lanes
        pairs = zip(torch.split(logits, size), torch.split(lanes.labels, size), strict=True)
        losses = [self.loss(part.float(), labels) for part, labels in pairs]
        grads = torch.autograd.grad(losses, list(self.params.values()))
        tree = LaneTree()
        for loss in losses:
            tree.add([loss.detach().float().clone()])
        height, (total,) = tree.root()
        yield LaneOutput(total, logits.detach(), list(grads), [], [], height)

    @torch.no_grad()
    def is_small(self, lanes: Lanes) -> bool:
        """Whether every activation of the whole batch is small: a property of shapes alone."""
        hidden, largest = lanes.images[:1], 0
        for layer in self._chain:
            hidden = layer(hidden)
            largest = max(largest, hidden.numel() * hidden.element_size())
        return largest * len(lanes.labels) <= _SMALL_BYTES


def chain_of(model: nn.Module) -> list[nn.Module] | None:
    """The layers of a model that is nothing but known layers in a row; None for any other."""
    layers: list[nn.Module] = []
    for _, module in model.named_modules(remove_duplicate=False):
        if type(module).forward in (nn.Sequential.forward, BlockModel.forward):
            continue
        if not _is_known(module):
            return None
        layers.append(module)
    params = [p for layer in layers for p in layer.parameters()]
    used_once = len(set(params)) == len(params) == len(list(model.parameters()))
    trained = all(p.requires_grad for p in params)
    return layers if used_once and trained and not list(model.buffers()) else None


def same_bits(together: Together, reference: LaneByLane, sample: Lanes) -> bool:
    """Whether both ways give every bit of loss, logits and gradients alike on this sample."""
    tree, logits = LaneTree(), []
    for output in reference.run(sample, 0):
        tree.add([output.loss, *output.grads])
        logits.append(output.logits)
    (found,) = together.run(sample, 0)
    pairs = zip([*tree.root()[1], torch.cat(logits)], [found.loss, *found.grads, found.logits], strict=True)
    return all(_bits_equal(a, b) for a, b in pairs)


def _is_known(layer: nn.Module) -> bool:
    """A stock layer as it comes: a kind we know, without hooks or a forward of its owner's."""
    if layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or "forward" in vars(layer):
        return False
    if isinstance(layer, nn.Conv2d) and (layer.padding_mode != "zeros" or isinstance(layer.padding, str)):
        return False
    return type(layer) in (nn.Conv2d, nn.Linear, *_PER_SAMPLE)


def _apply(layer: nn.Module, x: Tensor, lanes: int) -> Tensor:
    if isinstance(layer, nn.Conv2d):
        return lane_conv2d(x, layer, lanes)
    if isinstance(layer, nn.Linear):
        return lane_linear(x, layer.weight, layer.bias, lanes)
    result: Tensor = layer(x)
    return result


def _bits_equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))
