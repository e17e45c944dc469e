"""The buffers of a network on the device: flat tables of weights, and of gradients by lane.

A gradient's path begins here: backward → lane tree. A flat table holds all tensors of a network, one after
another. The parts of their gradients have the same order, with a row for each chunk of each lane.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.kernels.triton.compiler_watch import watch_compiler
from lockstep.kernels.triton.conv.fused_layer import Layer
from lockstep.kernels.triton.conv.tile import KERNEL_TYPES, Tile
from lockstep.kernels.triton.conv.tile_table import Table
from lockstep.kernels.triton.lane_tree_sum import lane_tree_sum
from lockstep.kernels.triton.optimizer_update import ALIGN
from lockstep.kernels.triton.softmax_loss import cross_entropy, lane_means
from lockstep.lower.layer_split import LaneWorkers
from lockstep.spec import Train
from lockstep.spec.rule.loss_rule import read_weights
from lockstep.spec.rule.loss_scale import PRECISION


@dataclass(frozen=True)
class Slot:
    """A tensor of `size` values; each lane computes a result for it, in `chunks` chunks.

    The result is the gradient of a parameter, or the new value of a statistic (a running mean or variance).
    """

    size: int
    chunks: int = 1
    is_statistic: bool = False


@dataclass
class _Group:
    """Adjacent tensors in the flat tables that have the same number of chunks for each lane."""

    chunks: int
    first: int
    stop: int = 0


class Layout:
    """The place of every tensor in the flat tables: parameters, statistics, the loss, the right answers."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.size = 0
        self.groups: list[_Group] = []
        order = sorted(range(len(slots)), key=lambda i: (slots[i].is_statistic, -slots[i].chunks))
        found = {i: self._take(slots[i]) for i in order}
        self.places = [found[i] for i in range(len(slots))]
        self.params = min((found[i].start for i in order if slots[i].is_statistic), default=self.size)
        self.loss: int = self._take(Slot(1)).start
        self.right: int = self._take(Slot(1)).start

    def _take(self, slot: Slot) -> slice:
        if not self.groups or self.groups[-1].chunks != slot.chunks:
            self.groups.append(_Group(slot.chunks, self.size))
        first = self.size
        self.size += -(-slot.size // ALIGN) * ALIGN
        self.groups[-1].stop = self.size
        return slice(first, first + slot.size)


class DeviceNetwork(ABC):
    """A network for `lanes` lanes: its flat tables, and buffers for images, labels and logits."""

    x: list[Tensor]  # the first tensor is the images, inside a border of `pad` zeros
    pad: tuple[int, int]
    keys: Tensor  # dropout keys, one for each layer and lane
    weights: Tensor  # the master weights
    copy: Tensor  # the weights in the kernels' type

    def __init__(
        self, slots: Sequence[Slot], classes: int, lanes: int, train: Train, device: torch.device
    ) -> None:
        watch_compiler()
        self.lanes, self.lane_size = lanes, train.batch // train.lanes
        self.dtype, self.precision = KERNEL_TYPES[train.precision]
        self._smoothing, self._device = train.label_smoothing, device
        numbers = read_weights(train.class_weights)
        self._class_weights = None if numbers is None else torch.tensor(numbers, device=device)
        self.layout = Layout(slots)
        count, single = lanes * self.lane_size, torch.float32
        self.labels = self.zeros(count, dtype=torch.int32)
        self.logits = self.zeros(count, classes, dtype=single)
        self.loss, self.right = self.zeros(count, dtype=single), self.zeros(count, dtype=single)
        self.weights, self.copy = self.new_weights()
        self.scale: Tensor | None = None  # of the loss in fp16, and its inverse
        if train.precision == PRECISION:
            self.scale = torch.ones(2, device=device)
        self.all_lanes: Callable[[Tensor], Tensor] = lambda own: own  # [L, …] → [V, …] of all lanes

    @abstractmethod
    def compute(self) -> None:
        """Compute what `sum_lanes` sums, from images, labels, keys and weights."""

    @abstractmethod
    def share_with(self, workers: LaneWorkers | None) -> None:
        """Deal products out to these workers, who compute the same lanes; None: compute all of each."""

    def new_weights(self) -> tuple[Tensor, Tensor]:
        """A table of weights, and one of their copy, both zeros."""
        return self.zeros(self.layout.size, dtype=torch.float32), self.zeros(self.layout.size)

    def make_weights(self) -> None:
        """Have new tables of weights."""
        self.take_weights(*self.new_weights())

    def take_weights(self, weights: Tensor, copy: Tensor) -> None:
        """Use these tables of weights."""
        self.weights, self.copy = weights, copy

    def drop_tables(self) -> None:
        """Free weights and results; a pass needs both again, a later pass what `make_results` restores."""
        none = self.zeros(1, dtype=torch.float32).expand(self.layout.size)
        self.take_weights(none, none)

    @abstractmethod
    def sum_lanes(self, lanes: range, out: Tensor, bad: Tensor) -> None:
        """Sum gradients, statistics, loss and right answers of a power of two of lanes by the lane tree."""

    def unscale(self, out: Tensor) -> None:
        """Take the scale of the loss off the gradients in a flat table."""
        if self.scale is not None:
            out[: self.layout.params].mul_(self.scale[1])

    def zeros(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """A buffer of zeros, in the kernels' type by default."""
        return torch.zeros(shape, dtype=dtype or self.dtype, device=self._device)


class KernelNetwork(DeviceNetwork):
    """A network of fused layers, with a table of parts of gradients: a row for each chunk of each lane."""

    layers: list[Layer]
    tiles: list[dict[str, Tile]]  # for each layer, a tile for each operation

    def __init__(
        self, slots: Sequence[Slot], classes: int, lanes: int, train: Train, device: torch.device
    ) -> None:
        super().__init__(slots, classes, lanes, train, device)
        self._kept: Tensor | None = None
        self.make_results()

    def make_results(self, backward: bool = True) -> None:
        """Make the parts; a forward pass only writes statistics. Those that were dropped are there again."""
        groups = [(g, g.chunks if backward or g.stop > self.layout.params else 0) for g in self.layout.groups]
        self._parts = [
            self.zeros(self.lanes * chunks, group.stop - group.first, dtype=torch.float32)
            for group, chunks in groups
        ]
        if self._kept is not None:
            self.part(self._statistic_places).copy_(self._kept)

    def drop_tables(self) -> None:
        super().drop_tables()
        if self._parts:  # evaluation makes none
            self._kept, self._parts = self.part(self._statistic_places).clone(), []

    @property
    def _statistic_places(self) -> slice:
        return slice(self.layout.params, self.layout.loss)

    @property
    def pad(self) -> tuple[int, int]:  # type: ignore[override]
        """The border that the first layer reads."""
        return self.layers[0].pad

    @abstractmethod
    def forward(self) -> None:
        """x[0] and the weights' copy → logits, as in training."""

    @abstractmethod
    def run(self, operation: str, i: int) -> None:
        """Launch one operation of layer i."""

    def enter(self, given: Sequence[Tensor]) -> None:
        """Take images, or what the part before has sent: first its output [N, H, W, C]."""
        fill_inside(self.x[0], given[0])

    @abstractmethod
    def score(self) -> None:
        """logits and labels → each sample's loss, whether it is right, and the gradient of its logits."""

    @abstractmethod
    def backward(self) -> None:
        """logits and labels → the parts of all gradients, each lane's loss and its right answers."""

    def compute(self) -> None:
        self.forward()
        self.backward()

    def score_into(self, grad: Tensor, class_weights: Tensor | None = None) -> None:
        """logits and labels → each sample's loss, whether it is right, and the gradient of its logits.

        Evaluation has no weights of classes.
        """
        cross_entropy(
            self.logits, self.labels, self.loss, self.right, grad.view(len(self.logits), -1),
            self.lane_size, self._smoothing, self.scale, class_weights,
        )  # fmt: skip

    def average_scores(self) -> None:
        """Write each lane's mean loss and right answers to the parts, beside its gradients."""
        ends = [self.part(slice(at, at + 1)).squeeze(1) for at in (self.layout.loss, self.layout.right)]
        lane_means(self.loss, self.right, *ends)

    def sum_lanes(self, lanes: range, out: Tensor, bad: Tensor) -> None:
        for group, parts in zip(self.layout.groups, self._parts, strict=True):
            own = parts[lanes.start * group.chunks : lanes.stop * group.chunks]
            lane_tree_sum(own, out[group.first : group.stop], bad, 1.0)
        self.unscale(out)

    def part(self, place: slice) -> Tensor:
        """The columns of the parts that hold the gradients of `place`."""
        for group, parts in zip(self.layout.groups, self._parts, strict=True):
            if group.first <= place.start < group.stop:
                return parts[:, place.start - group.first : place.stop - group.first]
        raise AssertionError(place)


def inside(x: Tensor, high: int, wide: int) -> Tensor:
    """The pixels of images [N, H, W, C] without their border."""
    top, left = (x.shape[1] - high) // 2, (x.shape[2] - wide) // 2
    return x[:, top : top + high, left : left + wide]


def fill_inside(x: Tensor, values: Tensor) -> None:
    """Copy images [N, H, W, C] into a buffer with a border, or into the rows of a fully connected layer."""
    if x.shape[3] == values.shape[3]:
        inside(x, *values.shape[1:3]).copy_(values)
    else:
        x.copy_(values.reshape(x.shape))


Make = Callable[[int, Train, torch.device, Table], DeviceNetwork]  # the first argument: number of lanes
