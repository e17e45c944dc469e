"""Runs all lanes of a small chain of layers in one call on a CPU, if a probe finds every bit equal.

The forward pass and the data gradients take all lanes in one call. Weight gradients and the loss, which
reduce over samples, are computed lane by lane and summed by the lane tree. On small layers a call costs more
than its arithmetic, so fewer calls make lanes cheap. This gives the right bits only if a sample's result does
not depend on its batch. Stock kernels do not promise that, so `same_bits` checks it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from lockstep.comm.tree import LaneTree, subtrees
from lockstep.data.loader import Lanes
from lockstep.kernels import random
from lockstep.kernels.loss import Loss, label_loss
from lockstep.kernels.numerics import seed_stream
from lockstep.kernels.stock.batched_conv import batched_conv2d
from lockstep.kernels.stock.batched_linear import batched_linear
from lockstep.lower.fixed_lane import fixed_values, fixed_weights
from lockstep.lower.lane_by_lane import LaneByLane, LaneOutput
from lockstep.lower.param_gradient import OnGradient
from lockstep.models.block import BlockModel

_SMALL_BYTES = 16 << 20  # of the largest activation; larger ones fit the cache only one lane at a time
_PER_SAMPLE = (nn.ReLU, nn.Sigmoid, nn.Tanh, nn.MaxPool2d, nn.AvgPool2d, nn.Flatten, nn.Identity)


class BatchedLanes(LaneByLane):
    """Runs the lanes of a chain of layers in one call."""

    def __init__(self, model: nn.Module, loss: Loss, seed: int, chain: list[nn.Module]) -> None:
        super().__init__(model, loss, seed, half=None)
        self._chain = chain

    def run(self, lanes: Lanes, step: int, early: OnGradient | None = None) -> Iterator[LaneOutput]:
        """One output for each maximal aligned subtree of the lanes: the sum over it."""
        self.model.train()
        trees = subtrees(lanes.numbers)
        for first, height in trees:
            last = first == trees[-1][0]
            yield self._run_subtree(lanes.range(first, 1 << height), step, early if last else None)

    def _run_subtree(self, lanes: Lanes, step: int, early: OnGradient | None) -> LaneOutput:
        logits = lanes.images
        for layer in self._chain:
            logits = _apply(layer, logits, lanes.num_lanes)
        size = lanes.lane_size
        pairs = zip(torch.split(logits, size), torch.split(lanes.labels, size), strict=True)
        losses = []
        for lane, (part, labels) in enumerate(pairs, lanes.first):
            seed_stream(part.device, random.key("lane", self._seed, step, lane))  # if the loss draws
            losses.append(label_loss(self.loss, part.float(), labels))
        grads = self._gradients(losses, early)
        tree = LaneTree()
        for loss in losses:
            tree.add([loss.detach().float().clone()])
        height, (total,) = tree.root()
        return LaneOutput(total, logits.detach(), list(grads), [], [], height)

    @torch.no_grad()
    def is_small(self, lanes: Lanes) -> bool:
        """Whether every activation of the whole batch is small: a property of shapes alone."""
        hidden, largest = lanes.images[:1], 0
        for layer in self._chain:
            hidden = layer(hidden)
            largest = max(largest, hidden.numel() * hidden.element_size())
        return largest * len(lanes.labels) <= _SMALL_BYTES


def chain_of(model: nn.Module, with_dropout: bool = False) -> list[nn.Module] | None:
    """The layers of a model that is a plain sequence of known layers; None for any other model."""
    layers: list[nn.Module] = []
    for _, module in model.named_modules(remove_duplicate=False):
        if not is_untouched(module):
            return None
        if getattr(type(module), "forward", None) in (nn.Sequential.forward, BlockModel.forward):
            continue
        if not (_is_known(module) or (with_dropout and type(module) is nn.Dropout)):
            return None
        layers.append(module)
    params = [p for layer in layers for p in layer.parameters()]
    used_once = len(set(params)) == len(params) == len(list(model.parameters()))
    trained = all(p.requires_grad for p in params)
    return layers if used_once and trained and not list(model.buffers()) else None


def same_bits(batched: BatchedLanes, reference: LaneByLane, sample: Lanes) -> bool:
    """Whether both ways give the same bits of loss, logits and gradients at the shapes of `sample`.

    Weights and images are set to fixed values: zeros would hide a difference, and a resumed run must make
    the same choice as the first one.
    """
    images = torch.empty_like(sample.images).copy_(fixed_values("images", sample.images) * 4)
    probe = Lanes(images, sample.labels, sample.num_lanes, sample.first)
    with fixed_weights(batched.model):
        one, other = (_sums(way, probe) for way in (reference, batched))
    return all(_bits_equal(a, b) for a, b in zip(one, other, strict=True))


def _sums(way: LaneByLane, lanes: Lanes) -> list[Tensor]:
    """Logits, and loss and gradients summed over each maximal aligned subtree."""
    tree, logits = LaneTree(lanes.first), []
    for output in way.run(lanes, 0):
        tree.add([output.loss, *output.grads], output.height)
        logits.append(output.logits)
    return [torch.cat(logits), *(tensor for _, _, leaf in tree.roots() for tensor in leaf)]


def is_untouched(module: nn.Module) -> bool:
    """Whether a module has no hooks, none on its parameters, and no forward that the user replaced."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    on_params = any(p._backward_hooks for p in module.parameters(recurse=False))
    return not (any(getattr(module, name) for name in hooks) or on_params or not _is_own(module))


def _is_own(module: nn.Module) -> bool:
    """Whether a module has the forward of its class, or that of our keyed dropout."""
    forward = vars(module).get("forward")
    return forward is None or hasattr(forward, "keyed")


def _is_known(layer: nn.Module) -> bool:
    """Whether a layer is a stock layer that computes every sample by itself."""
    if isinstance(layer, nn.Conv2d) and (layer.padding_mode != "zeros" or isinstance(layer.padding, str)):
        return False
    return type(layer) in (nn.Conv2d, nn.Linear, *_PER_SAMPLE)


def _apply(layer: nn.Module, x: Tensor, lanes: int) -> Tensor:
    if isinstance(layer, nn.Conv2d):
        return batched_conv2d(x, layer, lanes)
    if isinstance(layer, nn.Linear):
        return batched_linear(x, layer.weight, layer.bias, lanes)
    result: Tensor = layer(x)
    return result


def _bits_equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))
